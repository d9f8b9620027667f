//! Input of the first block: `x = wte[ids] + wpe[positions]`.
//!
//! The placement of the tokens determines the positions: after the cached tokens, in packed rows, or in
//! device memory.

use std::iter::repeat;

use candle_core::{Result, Tensor};
use candle_gpt2_attention::{Pass, Placement, SiteKind};
use candle_gpt2_kernels::{KernelError, Linear, add, add_positions, carried};

use crate::ModelError;

/// Token dimension of a `(B, T, C)` tensor.
const TOKEN_DIM: usize = 1;

/// Token and position embeddings.
#[derive(Debug, Clone)]
pub(crate) struct Embeddings {
    /// Token embedding, `(V, C)`.
    pub(crate) wte: Linear,
    /// Position embedding, `(n_positions, C)`.
    pub(crate) wpe: Tensor,
    pub(crate) embd_pdrop: f64,
}

/// Row indices of `wpe`.
enum Positions {
    /// Consecutive positions that start at this position in every row of the batch.
    From(usize),
    /// Consecutive positions, with a separate start for each row of the batch.
    FromEach(Vec<usize>),
    /// Explicit positions, `(1, T)`.
    Listed(Tensor),
    /// Positions in device memory, `(B, T)`.
    OnDevice(Tensor),
}

impl Embeddings {
    /// Embeds `ids` `(B, T)` as `(B, T, C)`.
    ///
    /// Row `b` of a cache has `past_lengths[b]` tokens; without a cache, `past_lengths` is empty.
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
            // A recording replays the computation, but not the ID check.
            Positions::OnDevice(_) => self.wte.embedding_on_device(ids)?,
            _ => self.of_tokens(ids)?,
        }; // (B, T, C)
        let x = if pass.wants(SiteKind::Embed) || pass.wants(SiteKind::PosEmbed) {
            // The observer receives both embeddings separately.
            let position_embeddings = self.add(&token_embeddings.zeros_like()?, positions)?;
            (pass.show(SiteKind::Embed, token_embeddings)?
                + pass.show(SiteKind::PosEmbed, position_embeddings)?)?
        } else {
            self.add(&token_embeddings, positions)?
        };
        let x = pass.cast(x)?;
        pass.dropout(x, self.embd_pdrop)
    }

    /// Looks up the token embeddings, `ids` `(…)` to `(…, C)`.
    pub(crate) fn of_tokens(&self, ids: &Tensor) -> Result<Tensor> {
        self.wte.embedding(ids).map_err(|error| match carried(&error) {
            Some(KernelError::NoSuchRow { row, rows }) => {
                ModelError::NoSuchToken { id: *row, vocab_size: *rows }.into()
            }
            _ => error,
        })
    }

    /// Adds the embeddings of the positions to `x` `(B, T, C)`.
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

    /// Returns the positions of the tokens, and checks that they fit into the context.
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

/// Rejects packed rows that do not match the token tensor of the pass.
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
