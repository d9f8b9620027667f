//! What enters the first block: `x = wte[ids] + wpe[positions]`.
//!
//! The positions follow from the placement of the tokens: after what the cache holds, in rows of one text, or where only the device
//! knows.

use std::iter::repeat;

use candle_core::{Result, Tensor};
use candle_gpt2_attention::{Pass, Placement, SiteKind};
use candle_gpt2_kernels::{Linear, add, add_positions};

use crate::ModelError;

/// Axis of the tokens in a `(B, T, C)` tensor.
const TOKEN_DIM: usize = 1;

/// Token and position embeddings.
#[derive(Debug, Clone)]
pub(crate) struct Embeddings {
    /// `(V, C)`.
    pub(crate) wte: Linear,
    /// `(n_positions, C)`.
    pub(crate) wpe: Tensor,
    pub(crate) embd_pdrop: f64,
}

/// Rows of `wpe`.
enum Positions {
    /// From this one on, for every row of the batch.
    From(usize),
    /// From another one on for each row of the batch.
    FromEach(Vec<usize>),
    /// These, `(1, T)`.
    Listed(Tensor),
    /// `(B, T)`, in the device's memory.
    OnDevice(Tensor),
}

impl Embeddings {
    /// `ids` `(B, T)` to `(B, T, C)`; row `b` of a cache holds `past_lengths[b]` tokens, and without one there are no lengths.
    pub(crate) fn forward(&self, ids: &Tensor, past_lengths: &[usize], pass: &mut Pass) -> Result<Tensor> {
        let (batch, tokens) = ids.dims2()?;
        if tokens == 0 || batch == 0 {
            return Err(ModelError::NoTokens.into());
        }
        let positions = self.positions((batch, tokens), past_lengths, pass)?;
        let no_past = vec![0; batch];
        pass.enter_layer(None);
        pass.begin(if past_lengths.is_empty() { &no_past } else { past_lengths }, tokens);
        let token_embeddings = match &positions {
            // A recording replays what is computed, not a look at the ids.
            Positions::OnDevice(_) => self.wte.embedding_on_device(ids)?,
            _ => self.wte.embedding(ids)?,
        }; // (B, T, C)
        let x = if pass.wants(SiteKind::Embed) || pass.wants(SiteKind::PosEmbed) {
            // The observer wants both apart.
            let position_embeddings = self.add(&token_embeddings.zeros_like()?, positions)?;
            (pass.show(SiteKind::Embed, token_embeddings)?
                + pass.show(SiteKind::PosEmbed, position_embeddings)?)?
        } else {
            self.add(&token_embeddings, positions)?
        };
        let x = pass.cast(x)?;
        pass.dropout(x, self.embd_pdrop)
    }

    /// `x` `(B, T, C)` plus the embeddings of its positions.
    fn add(&self, x: &Tensor, positions: Positions) -> Result<Tensor> {
        match positions {
            Positions::From(first) => add_positions(x, &self.wpe, first),
            Positions::FromEach(firsts) => {
                let tokens = x.dim(TOKEN_DIM)?;
                let rows = firsts.into_iter().map(|first| self.wpe.narrow(0, first, tokens));
                x + Tensor::stack(&rows.collect::<Result<Vec<_>>>()?, 0)?
            }
            Positions::Listed(positions) => {
                add(x, &Linear::new(self.wpe.clone(), None)?.embedding_on_device(&positions)?)
            }
            Positions::OnDevice(positions) => {
                x + self.wpe.embedding(&positions.flatten_all()?)?.reshape(x.shape())?
            }
        }
    }

    /// The positions of tokens, which fit into the context.
    fn positions(
        &self,
        (batch, tokens): (usize, usize),
        past_lengths: &[usize],
        pass: &Pass,
    ) -> Result<Positions> {
        let (placement, offset) = (pass.placement(), pass.first_position());
        let n_positions = self.wpe.dim(0)?;
        let past = past_lengths.iter().copied().max().unwrap_or(0);
        if let Placement::Rows(rows) = placement {
            expect_rows(rows, (batch, tokens), n_positions)?;
            let mut positions = Vec::with_capacity(tokens);
            for (added, past) in rows.iter().copied().zip(past_lengths.iter().copied().chain(repeat(0))) {
                expect_room(past, added, n_positions)?;
                for position in past..past + added {
                    positions.push(u32::try_from(position).map_err(candle_core::Error::wrap)?);
                }
            }
            return Ok(Positions::Listed(Tensor::from_vec(positions, (1, tokens), self.wpe.device())?));
        }
        expect_room(past.saturating_add(offset), tokens, n_positions)?;
        Ok(match placement {
            Placement::OnDevice(positions) => Positions::OnDevice(positions.clone()),
            _ if past_lengths.iter().all(|length| *length == past) => Positions::From(past + offset),
            _ => Positions::FromEach(past_lengths.iter().map(|past| past + offset).collect()),
        })
    }
}

fn expect_room(past: usize, added: usize, n_positions: usize) -> Result<()> {
    if past.saturating_add(added) > n_positions {
        return Err(ModelError::ContextExceeded { past, added, n_positions }.into());
    }
    Ok(())
}

/// Refuses rows that are not the one text of a pass.
fn expect_rows(rows: &[usize], found: (usize, usize), n_positions: usize) -> Result<()> {
    if let Some(row) = rows.iter().position(|length| !(1..=n_positions).contains(length)) {
        return Err(ModelError::RowLength { row, tokens: rows[row], n_positions }.into());
    }
    let expected = rows.iter().sum();
    if found != (1, expected) {
        return Err(ModelError::NotTheRows { expected, found }.into());
    }
    Ok(())
}
