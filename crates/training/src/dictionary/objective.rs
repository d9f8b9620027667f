//! Loss of a dictionary on a batch, and its manually derived gradient.
//!
//! The manual gradient reads only the decoder rows of active latents. With `xc = x − b_dec` (for a transcoder
//! `xc = x`) and `a = xc W_encᵀ + b_enc`, a few entries of `a` become the latents `z`. Then
//! `ŷ = z W_dec + b_dec (+ x W_skipᵀ)`. The loss is the fraction of variance unexplained over the batch,
//! `‖ŷ − y‖² / ‖y − mean y‖²`, plus terms of the kind:
//!
//! ```text
//! top-k, batch-top-k,  1/32 · min(dead / (L D/2), 1) · ‖e − ê‖² / ‖e − mean e‖²: e = y − ŷ is a constant;
//! transcoders          ê = â W_dec with the D/2 largest a of dead latents, even negative ones, as in SAELens
//! matryoshka           the same; the fraction is the mean over five separate reconstructions, with the first
//!                      F/16, F/8, F/4, F/2 and all latents
//! standard             λ mean Σ z / √C, with directions of length 1
//! JumpReLU             λ (L0 / k − 1)², z = a · 1[a > θ]; within the width ω around θ,
//!                      ∂z/∂θ = −θ/ω and ∂1[a > θ]/∂θ = −1/ω
//! gated                λ mean Σ π₊ / √C, and ‖π₊ W_dec + b_dec − y‖² / ‖y − mean y‖² with constant W_dec and
//!                      b_dec; π = a opens the gates, and z = 1[π > 0] · (exp(r) · (a − b_enc) + b_mag)₊
//! ```
//!
//! Gradients flow only through selected entries. Matrices have one row per latent: `W_enc` is `(F, C)`, the
//! transpose of SAELens's.
//!
//! A cross-layer transcoder has `L` blocks, each with its own input, latents and output. Latents write to the
//! outputs of their block and of later blocks: `ŷ_k = Σ_{l ≤ k} z_l W_dec_{l→k} + b_dec_k`. The largest
//! latents are selected among all blocks, and the losses are sums over all outputs. Every other kind has one
//! block. Values and parameters of the blocks are concatenated. The matrices of a decoder are in this order:
//! from block 0 to every output, from block 1 to every output except the first, and so on.

use std::ops::Range;

use candle_gpt2::Gpt2Config;
use candle_gpt2_arithmetic::{Float, MatrixView, SparseRows, map_items};

use super::{DictionaryKind, DictionaryNumbers};
use crate::TrainingError;

/// Weight of the auxiliary loss for dead latents.
const AUXILIARY_SHARE: f64 = 1.0 / 32.0;
/// JumpReLU's bandwidth, in scaled units: width of the range of values that affect a threshold.
pub(super) const BANDWIDTH: f64 = 0.1;
/// Number of rows per parallel task when selecting latents.
const PART_ROWS: usize = 16;

/// Parameters of a dictionary, in the trainer's order.
#[derive(Clone, Copy)]
pub(super) struct Weights<'a, T> {
    /// Encoder, `(L, F, C)`.
    pub(super) encoder: &'a [T],
    /// Encoder bias, `(L, F)`.
    pub(super) encoder_bias: &'a [T],
    /// Decoder: one matrix `(F, D)` for each pair of a block and an output that it contributes to.
    pub(super) decoder: &'a [T],
    /// Decoder bias, `(L, D)`.
    pub(super) decoder_bias: &'a [T],
    /// Additional parameters that only some kinds have.
    ///
    /// These are the logarithms of the thresholds `(F)`, `r` and `b_mag` `(F)`, or the skip connection
    /// `(D, C)`.
    pub(super) more: [&'a [T]; 2],
}

/// Returns the parameter names of a kind.
pub(super) fn names(kind: DictionaryKind) -> &'static [&'static str] {
    match kind {
        DictionaryKind::TopK
        | DictionaryKind::BatchTopK
        | DictionaryKind::Matryoshka
        | DictionaryKind::Standard
        | DictionaryKind::Transcoder
        | DictionaryKind::CrossLayerTranscoder => &["W_enc", "b_enc", "W_dec", "b_dec"],
        DictionaryKind::JumpRelu => &["W_enc", "b_enc", "W_dec", "b_dec", "log_threshold"],
        DictionaryKind::Gated => &["W_enc", "b_enc", "W_dec", "b_dec", "r_mag", "b_mag"],
        DictionaryKind::SkipTranscoder => &["W_enc", "b_enc", "W_dec", "b_dec", "W_skip"],
    }
}

impl<'a, T> Weights<'a, T> {
    /// Creates the weights from at least four slices in the order of [`names`].
    pub(super) fn of(values: &[&'a [T]]) -> Option<Self> {
        let [encoder, encoder_bias, decoder, decoder_bias, more @ ..] = values else { return None };
        let more = [0, 1].map(|index| more.get(index).copied().unwrap_or_default());
        Some(Self { encoder, encoder_bias, decoder, decoder_bias, more })
    }

    /// Returns the weights with only one block's encoder.
    pub(super) fn of_block(self, objective: &Objective, block: usize) -> Self {
        let encoder = objective.of_block(self.encoder, block);
        Self { encoder, encoder_bias: objective.of_block(self.encoder_bias, block), ..self }
    }
}

/// Structure of a dictionary, without its parameters.
#[derive(Debug, Clone, Copy)]
pub(super) struct Objective {
    pub(super) kind: DictionaryKind,
    pub(super) k: usize,
    pub(super) sparsity: f64,
    /// Number of blocks, `L`: the model's for a cross-layer transcoder, otherwise 1.
    pub(super) blocks: usize,
    /// Input width of a block, `C`.
    pub(super) inputs: usize,
    /// Output width of a block, `D`.
    pub(super) outputs: usize,
    /// Number of latents per block, `F`.
    pub(super) latents: usize,
}

/// Selection of active latents.
#[derive(Debug, Clone, Copy)]
pub(super) enum Selection {
    Training,
    /// Selection outside training, with the running threshold if the kind has one.
    Use(f64),
}

/// Latents for a batch of rows.
pub(super) struct Encoded<T> {
    /// `xc`, `(L, N, C)`.
    centered: Vec<T>,
    /// `a`, `(L, N, F)`.
    before: Vec<T>,
    /// Active latents of each block.
    ///
    /// In training, JumpReLU also includes latents slightly below their threshold, with value 0.
    pub(super) active: Vec<SparseRows<T>>,
    /// Smallest kept value, for kinds that keep the largest values.
    min_kept: Option<f64>,
}

/// Loss, gradients and statistics of a batch.
pub(super) struct Computed<T> {
    pub(super) loss: f64,
    /// Gradients in parameter order.
    pub(super) gradients: Vec<Vec<T>>,
    /// Flags for the latents that were active in any row.
    pub(super) fired: Vec<bool>,
    /// Smallest kept value, for kinds that keep the largest values.
    pub(super) min_kept: Option<f64>,
}

impl Objective {
    /// Creates the objective of a dictionary for a model with this configuration.
    ///
    /// # Errors
    /// See [`DictionaryNumbers::sites`].
    pub(super) fn new(numbers: &DictionaryNumbers, config: &Gpt2Config) -> Result<Self, TrainingError> {
        let DictionaryNumbers { kind, k, sparsity, latents, .. } = *numbers;
        let sites = numbers.sites(config)?;
        let [(_, inputs), (_, outputs)] = sites[0]; // There is at least one block.
        Ok(Self { kind, k, sparsity, blocks: sites.len(), inputs, outputs, latents })
    }

    /// Returns one block's part of concatenated values or parameters.
    pub(super) fn of_block<'a, V>(&self, values: &'a [V], block: usize) -> &'a [V] {
        let count = values.len() / self.blocks;
        &values[block * count..(block + 1) * count]
    }

    /// Mutable version of [`Objective::of_block`].
    pub(super) fn of_block_mut<'a, V>(&self, values: &'a mut [V], block: usize) -> &'a mut [V] {
        let count = values.len() / self.blocks;
        &mut values[block * count..(block + 1) * count]
    }

    /// Range of the decoder matrix from `block`'s latents to the output of block `target`.
    ///
    /// `target` is `block` itself or a later block.
    pub(super) fn matrix(&self, block: usize, target: usize) -> Range<usize> {
        let before: usize = (0..block).map(|block| self.blocks - block).sum();
        let size = self.latents * self.outputs;
        (before + target - block) * size..(before + target - block + 1) * size
    }

    /// Number of matrices in the decoder.
    pub(super) fn matrices(&self) -> usize {
        self.blocks * (self.blocks + 1) / 2
    }

    /// Returns the ranges of each latent's decoder rows, one per output.
    pub(super) fn directions(&self) -> impl Iterator<Item = impl Iterator<Item = Range<usize>> + Clone> {
        let (all, width) = (*self, self.outputs);
        let of_latent = move |block: usize, latent: usize| {
            (block..all.blocks).map(move |target| {
                let start = all.matrix(block, target).start + latent * width;
                start..start + width
            })
        };
        (0..all.blocks).flat_map(move |block| (0..all.latents).map(move |latent| of_latent(block, latent)))
    }

    /// Computes the latents for the input rows `x`, `(L, N, C)`.
    pub(super) fn encode<T: Float>(
        &self,
        weights: Weights<'_, T>,
        x: &[T],
        selection: Selection,
    ) -> Encoded<T> {
        let Self { inputs, latents, .. } = *self;
        let rows = x.len() / (self.blocks * inputs);
        let mut centered = x.to_vec();
        if !self.kind.is_transcoder() {
            for row in centered.chunks_mut(inputs) {
                row.iter_mut().zip(weights.decoder_bias).for_each(|(value, bias)| *value -= *bias);
            }
        }
        let mut of_blocks = (0..self.blocks).map(|block| {
            let weights = weights.of_block(self, block);
            let encoder = MatrixView::new(weights.encoder, latents, inputs);
            let centered = MatrixView::new(self.of_block(&centered, block), rows, inputs);
            T::product(centered, encoder.transposed(), Some(weights.encoder_bias))
        });
        let mut before = of_blocks.next().unwrap_or_default();
        before.reserve_exact((self.blocks - 1) * rows * latents);
        of_blocks.for_each(|of_block| before.extend(of_block));
        let (active, min_kept) = self.select(weights, &before, selection);
        Encoded { centered, before, active, min_kept }
    }

    /// Returns the initial outputs of `rows` rows, `(L, N, D)`: the decoder biases.
    pub(super) fn biases<T: Float>(&self, weights: Weights<'_, T>, rows: usize) -> Vec<T> {
        (0..self.blocks).flat_map(|block| self.of_block(weights.decoder_bias, block).repeat(rows)).collect()
    }

    /// Adds the outputs of a block's latents and skip connection, for input `x` `(N, C)`.
    pub(super) fn write<T: Float>(
        &self,
        weights: Weights<'_, T>,
        block: usize,
        (x, active): (&[T], &SparseRows<T>),
        outputs: &mut [T],
    ) {
        if self.kind == DictionaryKind::SkipTranscoder {
            let skip = MatrixView::new(weights.more[0], self.outputs, self.inputs);
            let x = MatrixView::new(x, active.rows(), self.inputs);
            T::product_to(x, skip.transposed(), self.of_block_mut(outputs, block), false);
        }
        self.write_latents(weights, block, active, outputs);
    }

    /// Adds the outputs of a block's latents to `outputs`.
    fn write_latents<T: Float>(
        &self,
        weights: Weights<'_, T>,
        block: usize,
        active: &SparseRows<T>,
        outputs: &mut [T],
    ) {
        for target in block..self.blocks {
            let decoder = self.decoder(weights, block, target);
            T::add_sparse_product(active, decoder, self.of_block_mut(outputs, target));
        }
    }

    /// Backpropagates the outputs' gradient to a block's entries.
    ///
    /// Adds the decoder's gradient to `of_decoder`, and returns the gradient of the entries.
    fn write_back<T: Float>(
        &self,
        weights: Weights<'_, T>,
        block: usize,
        active: &SparseRows<T>,
        gradient: &[T],
        of_decoder: &mut [T],
    ) -> Vec<T> {
        let mut of_latents = Vec::new();
        for target in block..self.blocks {
            let gradient = MatrixView::new(self.of_block(gradient, target), active.rows(), self.outputs);
            T::add_sparse_gradient(active, gradient, &mut of_decoder[self.matrix(block, target)]);
            let products = T::sparse_products(active, gradient, self.decoder(weights, block, target));
            match target == block {
                true => of_latents = products,
                false => T::add_to(&mut of_latents, &products),
            }
        }
        of_latents
    }

    /// Returns the decoder matrix from the latents of a block to one output.
    fn decoder<'a, T: Float>(
        &self,
        weights: Weights<'a, T>,
        block: usize,
        target: usize,
    ) -> MatrixView<'a, T> {
        MatrixView::new(&weights.decoder[self.matrix(block, target)], self.latents, self.outputs)
    }

    /// Sum of the rows' squared distances from the mean of their block.
    fn deviations<T: Float>(&self, values: &[T]) -> f64 {
        (0..self.blocks).map(|block| deviations(self.of_block(values, block), self.outputs)).sum()
    }

    /// Returns the active latents and the smallest kept value.
    fn select<T: Float>(
        &self,
        weights: Weights<'_, T>,
        before: &[T],
        selection: Selection,
    ) -> (Vec<SparseRows<T>>, Option<f64>) {
        let in_training = matches!(selection, Selection::Training);
        match (self.kind, selection) {
            (DictionaryKind::TopK, _) => {
                (self.each_row(before, |_, row| largest(row, self.k, |_, value| value > T::ZERO)), None)
            }
            (DictionaryKind::Standard, _) => {
                let of_row = |_, row: &[T]| {
                    row.iter().copied().enumerate().filter(|(_, value)| *value > T::ZERO).collect()
                };
                (self.each_row(before, of_row), None)
            }
            (DictionaryKind::JumpRelu, _) => {
                let of_row = |_, row: &[T]| {
                    let with_thresholds = row.iter().zip(weights.more[0]).enumerate();
                    let latent = |(place, (value, threshold)): (usize, (&T, &T))| {
                        let threshold = libm::exp(threshold.to_f64());
                        let distance = value.to_f64() - threshold;
                        let is_active = distance > 0.0;
                        let is_near = in_training && distance.abs() < BANDWIDTH / 2.0;
                        let value = if is_active { *value } else { T::ZERO };
                        (is_active || is_near).then_some((place, value))
                    };
                    with_thresholds.filter_map(latent).collect()
                };
                (self.each_row(before, of_row), None)
            }
            (DictionaryKind::Gated, _) => {
                let of_row = |_, row: &[T]| {
                    let open = row.iter().enumerate().filter(|(_, value)| **value > T::ZERO);
                    open.map(|(place, value)| (place, self.magnitude(weights, place, *value))).collect()
                };
                (self.each_row(before, of_row), None)
            }
            (_, Selection::Use(threshold)) => {
                let threshold = T::of(threshold.max(0.0));
                let of_row = |_, row: &[T]| {
                    let above = row.iter().copied().enumerate();
                    above.filter(|(_, value)| *value > threshold).collect()
                };
                (self.each_row(before, of_row), None)
            }
            (_, Selection::Training) => self.largest_of_batch(before),
        }
    }

    /// Returns the magnitude of a latent with this positive gate value.
    fn magnitude<T: Float>(&self, weights: Weights<'_, T>, latent: usize, gate: T) -> T {
        let [scale, bias] = weights.more;
        let own = gate - weights.encoder_bias[latent];
        let size = own * T::of(libm::exp(scale[latent].to_f64())) + bias[latent];
        if size > T::ZERO { size } else { T::ZERO }
    }

    /// Selects entries from each row of every block; `of_row` receives the block and the row.
    fn each_row<T: Float>(
        &self,
        before: &[T],
        of_row: impl Fn(usize, &[T]) -> Vec<(usize, T)> + Sync,
    ) -> Vec<SparseRows<T>> {
        let of_block = |block| {
            let parts = self.of_block(before, block).chunks(PART_ROWS * self.latents);
            let selected = map_items(parts, |part| {
                part.chunks(self.latents).map(|row| of_row(block, row)).collect::<Vec<_>>()
            });
            let mut rows = SparseRows::default();
            selected.into_iter().flatten().for_each(|entries| rows.add_row(entries));
            rows
        };
        (0..self.blocks).map(of_block).collect()
    }

    /// Keeps the largest positive values of all rows and blocks, `k` per row on average.
    ///
    /// Ties go to the first.
    fn largest_of_batch<T: Float>(&self, before: &[T]) -> (Vec<SparseRows<T>>, Option<f64>) {
        let wanted = self.k * (before.len() / (self.blocks * self.latents));
        let mut positive: Vec<T> = before.iter().copied().filter(|value| *value > T::ZERO).collect();
        if positive.len() <= wanted {
            let min_kept = positive.iter().map(|value| value.to_f64()).reduce(f64::min);
            let of_row = |_, row: &[T]| {
                row.iter().copied().enumerate().filter(|(_, value)| *value > T::ZERO).collect()
            };
            return (self.each_row(before, of_row), min_kept);
        }
        let (above, cut, _) =
            positive.select_nth_unstable_by(wanted - 1, |a, b| b.to_f64().total_cmp(&a.to_f64()));
        let cut = *cut;
        let mut equals = wanted - above.iter().filter(|value| **value > cut).count();
        let of_block = |block| {
            let mut rows = SparseRows::default();
            for row in self.of_block(before, block).chunks(self.latents) {
                let kept = row.iter().copied().enumerate().filter(|(_, value)| {
                    let is_equal = *value == cut && equals > 0;
                    equals -= usize::from(is_equal);
                    *value > cut || is_equal
                });
                rows.add_row(kept);
            }
            rows
        };
        ((0..self.blocks).map(of_block).collect(), Some(cut.to_f64()))
    }

    /// Computes the loss and its gradients for inputs `x` `(L, N, C)` and targets `y` `(L, N, D)`.
    ///
    /// `dead` marks the latents that should explain the remaining error.
    pub(super) fn compute<T: Float>(
        &self,
        weights: Weights<'_, T>,
        (x, y): (&[T], &[T]),
        dead: &[bool],
    ) -> Computed<T> {
        let Self { inputs, outputs, latents, .. } = *self;
        let encoded = self.encode(weights, x, Selection::Training);
        let Encoded { centered, before, active, min_kept } = &encoded;

        let variance = self.deviations(y);
        let of_variance = if variance > 0.0 { 1.0 / variance } else { 1.0 };
        let mut sums = Gradients::new(self, weights);
        let (mut loss, error) = match self.kind {
            DictionaryKind::Matryoshka => self.nested(weights, &encoded, (y, of_variance), &mut sums),
            _ => self.reconstruct(weights, (x, y), of_variance, &encoded, &mut sums),
        };

        if self.learns_from_dead() && dead.contains(&true) {
            let most = (outputs / 2).max(1);
            let revived = self.each_row(before, |block, row| {
                let dead = self.of_block(dead, block);
                largest(row, most, |latent, _| dead[latent])
            });
            let count = dead.iter().filter(|dead| **dead).count();
            let share = AUXILIARY_SHARE * (count as f64 / (self.blocks * most) as f64).min(1.0);
            // The residual e − ê with e = y − ŷ is computed with the opposite sign: ê + (ŷ − y).
            let scale = self.deviations(&error);
            let of_scale = if scale > 0.0 { share / scale } else { 0.0 };
            let mut left = error;
            for (block, revived) in revived.iter().enumerate() {
                self.write_latents(weights, block, revived, &mut left);
            }
            loss += squares(&left) * of_scale;
            T::scale(&mut left, 2.0 * of_scale);
            for (block, revived) in revived.iter().enumerate() {
                let of_revived = self.write_back(weights, block, revived, &left, &mut sums.decoder);
                sums.encode(block, &revived.with_values(of_revived), centered);
            }
        }
        if !self.kind.is_transcoder() {
            // The output bias is subtracted from the input.
            let mut back = std::mem::take(&mut sums.before);
            T::scale(&mut back, -1.0);
            let encoder = MatrixView::new(weights.encoder, latents, inputs);
            T::product_to(MatrixView::new(&back, 1, latents), encoder, &mut sums.decoder_bias, false);
        }

        let mut fired = vec![false; self.blocks * latents];
        for (block, active) in active.iter().enumerate() {
            let fired = self.of_block_mut(&mut fired, block);
            for (latent, value) in active.columns().iter().zip(active.values()) {
                fired[*latent] |= *value > T::ZERO;
            }
        }
        let min_kept = *min_kept;
        Computed { loss, gradients: sums.in_order(self.kind), fired, min_kept }
    }

    /// Computes the fraction of variance unexplained plus the kind's penalty; also returns `ŷ − y`.
    ///
    /// Adds the gradients to `sums`.
    fn reconstruct<T: Float>(
        &self,
        weights: Weights<'_, T>,
        (x, y): (&[T], &[T]),
        of_variance: f64,
        encoded: &Encoded<T>,
        sums: &mut Gradients<T>,
    ) -> (f64, Vec<T>) {
        let Encoded { centered, active, .. } = encoded;
        let rows = active[0].rows(); // There is at least one block.
        let mut error = self.biases(weights, rows);
        for (block, active) in active.iter().enumerate() {
            self.write(weights, block, (self.of_block(x, block), active), &mut error);
        }
        error.iter_mut().zip(y).for_each(|(output, y)| *output -= *y); // ŷ − y
        let mut loss = squares(&error) * of_variance;
        let mut output_gradient = error.clone();
        T::scale(&mut output_gradient, 2.0 * of_variance);

        let of_latents = active.iter().enumerate().map(|(block, active)| {
            let of_bias = self.of_block_mut(&mut sums.decoder_bias, block);
            T::sum_columns(self.of_block(&output_gradient, block), of_bias, true);
            self.write_back(weights, block, active, &output_gradient, &mut sums.decoder)
        });
        let mut of_latents: Vec<Vec<T>> = of_latents.collect();
        if self.kind == DictionaryKind::SkipTranscoder {
            let gradient = MatrixView::new(&output_gradient, rows, self.outputs); // of ŷ
            let x = MatrixView::new(x, rows, self.inputs);
            T::product_to(gradient.transposed(), x, &mut sums.more[0], true);
        }
        match self.kind {
            DictionaryKind::JumpRelu => loss += self.jump(weights, encoded, &of_latents[0], sums),
            DictionaryKind::Gated => {
                loss += self.gate(weights, encoded, (y, of_variance), &of_latents[0], sums);
            }
            _ => {
                if self.kind == DictionaryKind::Standard {
                    let of_one = self.sparsity / (rows as f64 * (self.outputs as f64).sqrt());
                    let sum: f64 = active[0].values().iter().map(|value| value.to_f64()).sum();
                    loss += of_one * sum;
                    of_latents[0].iter_mut().for_each(|gradient| *gradient += T::of(of_one));
                }
                for (block, (active, of_latents)) in active.iter().zip(of_latents).enumerate() {
                    sums.encode(block, &active.with_values(of_latents), centered);
                }
            }
        }
        (loss, error)
    }

    /// Computes the mean fraction of variance unexplained over all nested sizes.
    ///
    /// Also returns `ŷ − y` for the full dictionary, and adds the gradients to `sums`.
    fn nested<T: Float>(
        &self,
        weights: Weights<'_, T>,
        encoded: &Encoded<T>,
        (y, of_variance): (&[T], f64),
        sums: &mut Gradients<T>,
    ) -> (f64, Vec<T>) {
        let active = &encoded.active[0];
        let sizes = self.nested_sizes();
        let of_share = of_variance / sizes.len() as f64;
        let mut error = self.biases(weights, active.rows());
        error.iter_mut().zip(y).for_each(|(output, y)| *output -= *y);
        let (mut loss, mut first, mut parts) = (0.0, 0, Vec::new());
        for size in sizes {
            let mut part = SparseRows::default();
            for row in 0..active.rows() {
                part.add_row(active.row(row).filter(|(latent, _)| (first..size).contains(latent)));
            }
            self.write_latents(weights, 0, &part, &mut error);
            loss += squares(&error) * of_share;
            parts.push((part, error.clone()));
            first = size;
        }
        // A latent belongs to its own nested size and every larger one.
        let mut gradient = vec![T::ZERO; error.len()];
        for (part, mut error) in parts.into_iter().rev() {
            T::scale(&mut error, 2.0 * of_share);
            T::add_to(&mut gradient, &error);
            let of_part = self.write_back(weights, 0, &part, &gradient, &mut sums.decoder);
            sums.encode(0, &part.with_values(of_part), &encoded.centered);
        }
        T::sum_columns(&gradient, &mut sums.decoder_bias, true);
        (loss, error)
    }

    /// Sizes of the nested dictionaries, in increasing order.
    fn nested_sizes(&self) -> Vec<usize> {
        let mut sizes: Vec<usize> = [16, 8, 4, 2, 1].map(|part| (self.latents / part).max(1)).into();
        sizes.dedup();
        sizes
    }

    /// Returns the smallest value kept in training, when keeping `k` values per row on average.
    pub(super) fn min_kept<T: Float>(&self, weights: Weights<'_, T>, x: &[T]) -> Option<f64> {
        self.encode(weights, x, Selection::Training).min_kept
    }

    /// Whether dead latents have their own loss.
    fn learns_from_dead(&self) -> bool {
        self.kind == DictionaryKind::TopK || self.kind.has_running_threshold()
    }

    /// Computes JumpReLU's backward pass and returns the sparsity loss.
    fn jump<T: Float>(
        &self,
        weights: Weights<'_, T>,
        encoded: &Encoded<T>,
        of_latents: &[T],
        sums: &mut Gradients<T>,
    ) -> f64 {
        let active = &encoded.active[0];
        let (rows, wanted) = (active.rows() as f64, self.k as f64);
        let count = active.values().iter().filter(|value| **value > T::ZERO).count();
        let excess = count as f64 / rows / wanted - 1.0;
        // Gradient of the sparsity loss with respect to each indicator 1[a > θ].
        let of_count = 2.0 * self.sparsity * excess / wanted / rows;
        let mut back = Vec::with_capacity(of_latents.len());
        let mut place = 0;
        for row in 0..active.rows() {
            for (latent, value) in active.row(row) {
                let gradient = of_latents[place];
                place += 1;
                back.push(if value > T::ZERO { gradient } else { T::ZERO });
                let threshold = libm::exp(weights.more[0][latent].to_f64());
                let distance = encoded.before[row * self.latents + latent].to_f64() - threshold;
                if distance.abs() < BANDWIDTH / 2.0 {
                    let of_threshold = -(threshold * gradient.to_f64() + of_count) / BANDWIDTH;
                    // Gradient with respect to the threshold's logarithm.
                    sums.more[0][latent] += T::of(of_threshold * threshold);
                }
            }
        }
        sums.encode(0, &active.with_values(back), &encoded.centered);
        self.sparsity * excess * excess
    }

    /// Computes the backward pass of gates and magnitudes.
    ///
    /// Returns the sparsity loss plus the loss of the reconstruction from the gates alone.
    fn gate<T: Float>(
        &self,
        weights: Weights<'_, T>,
        encoded: &Encoded<T>,
        (y, of_variance): (&[T], f64),
        of_latents: &[T],
        sums: &mut Gradients<T>,
    ) -> f64 {
        let active = &encoded.active[0];
        let decoder = MatrixView::new(weights.decoder, self.latents, self.outputs);
        let mut gates = Vec::with_capacity(of_latents.len());
        for row in 0..active.rows() {
            gates.extend(active.row(row).map(|(latent, _)| encoded.before[row * self.latents + latent]));
        }
        let open: f64 = gates.iter().map(|gate| gate.to_f64()).sum();
        let gates = active.with_values(gates);
        let of_open = self.sparsity / (active.rows() as f64 * (self.outputs as f64).sqrt());
        let mut left = weights.decoder_bias.repeat(active.rows());
        T::add_sparse_product(&gates, decoder, &mut left);
        left.iter_mut().zip(y).for_each(|(output, y)| *output -= *y);
        let loss = squares(&left) * of_variance + open * of_open;
        T::scale(&mut left, 2.0 * of_variance);
        let of_gates =
            T::sparse_products(&gates, MatrixView::new(&left, active.rows(), self.outputs), decoder);

        let mut back = Vec::with_capacity(of_latents.len());
        let entries = active.columns().iter().zip(active.values()).zip(gates.values());
        for (((latent, size), gate), (of_size, of_gate)) in entries.zip(of_latents.iter().zip(of_gates)) {
            let of_gate = of_gate + T::of(of_open);
            sums.encoder_bias[*latent] += of_gate;
            let mut of_own = of_gate;
            if *size > T::ZERO {
                let scale = T::of(libm::exp(weights.more[0][*latent].to_f64()));
                let own = *gate - weights.encoder_bias[*latent];
                sums.more[0][*latent] += *of_size * own * scale;
                sums.more[1][*latent] += *of_size;
                of_own += *of_size * scale;
            }
            back.push(of_own);
        }
        sums.multiply(0, &active.with_values(back), &encoded.centered);
        loss
    }
}

/// Accumulated gradients.
struct Gradients<T> {
    objective: Objective,
    encoder: Vec<T>,
    encoder_bias: Vec<T>,
    /// Gradient of `xc W_encᵀ`, summed over the rows.
    before: Vec<T>,
    decoder: Vec<T>,
    decoder_bias: Vec<T>,
    more: [Vec<T>; 2],
}

impl<T: Float> Gradients<T> {
    fn new(objective: &Objective, weights: Weights<'_, T>) -> Self {
        let zeros = |like: &[T]| vec![T::ZERO; like.len()];
        Self {
            objective: *objective,
            encoder: zeros(weights.encoder),
            encoder_bias: zeros(weights.encoder_bias),
            before: zeros(weights.encoder_bias),
            decoder: zeros(weights.decoder),
            decoder_bias: zeros(weights.decoder_bias),
            more: weights.more.map(zeros),
        }
    }

    /// Adds a block's gradients of `xc W_encᵀ` to its encoder; `centered` contains all blocks.
    fn multiply(&mut self, block: usize, entries: &SparseRows<T>, centered: &[T]) {
        let all = self.objective;
        let centered = MatrixView::new(all.of_block(centered, block), entries.rows(), all.inputs);
        T::add_sparse_gradient(entries, centered, all.of_block_mut(&mut self.encoder, block));
        add_columns(entries, all.of_block_mut(&mut self.before, block));
    }

    /// Adds a block's gradients of `a` to its encoder and bias.
    fn encode(&mut self, block: usize, entries: &SparseRows<T>, centered: &[T]) {
        self.multiply(block, entries, centered);
        add_columns(entries, self.objective.of_block_mut(&mut self.encoder_bias, block));
    }

    fn in_order(self, kind: DictionaryKind) -> Vec<Vec<T>> {
        let [first, second] = self.more;
        let all = [self.encoder, self.encoder_bias, self.decoder, self.decoder_bias, first, second];
        all.into_iter().take(names(kind).len()).collect()
    }
}

/// Adds the sum of each column to `sums`.
fn add_columns<T: Float>(entries: &SparseRows<T>, sums: &mut [T]) {
    for (column, value) in entries.columns().iter().zip(entries.values()) {
        sums[*column] += *value;
    }
}

/// Returns the `count` largest allowed values of a row, ordered by index; ties go to the first.
fn largest<T: Float>(row: &[T], count: usize, is_allowed: impl Fn(usize, T) -> bool) -> Vec<(usize, T)> {
    let all = row.iter().copied().enumerate();
    let mut found: Vec<(usize, T)> = all.filter(|(place, value)| is_allowed(*place, *value)).collect();
    if count < found.len() {
        found.select_nth_unstable_by(count, |(a_place, a), (b_place, b)| {
            b.to_f64().total_cmp(&a.to_f64()).then(a_place.cmp(b_place))
        });
        found.truncate(count);
        found.sort_unstable_by_key(|(place, _)| *place);
    }
    found
}

/// Sum of squares.
pub(super) fn squares<T: Float>(values: &[T]) -> f64 {
    values.iter().map(|value| value.to_f64() * value.to_f64()).sum()
}

/// Sum of the rows' squared distances from their mean.
fn deviations<T: Float>(values: &[T], width: usize) -> f64 {
    let rows = values.len() / width.max(1);
    let mut mean = vec![0.0; width];
    for row in values.chunks(width) {
        mean.iter_mut().zip(row).for_each(|(sum, value)| *sum += value.to_f64());
    }
    mean.iter_mut().for_each(|sum| *sum /= rows.max(1) as f64);
    let of_row = |row: &[T]| -> f64 {
        let distances = row.iter().zip(&mean).map(|(value, mean)| value.to_f64() - mean);
        distances.map(|distance| distance * distance).sum()
    };
    values.chunks(width).map(of_row).sum()
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Result, Tensor, Var};
    use candle_gpt2_arithmetic::RandomStream;

    use super::*;

    const ROWS: usize = 11;
    const INPUTS: usize = 6;
    const LATENTS: usize = 23;

    fn objective(kind: DictionaryKind) -> Objective {
        // The input and output widths of a transcoder differ.
        let outputs = if kind.is_transcoder() { 9 } else { INPUTS };
        let blocks = if kind == DictionaryKind::CrossLayerTranscoder { 3 } else { 1 };
        Objective { kind, k: 4 * blocks, sparsity: 0.7, blocks, inputs: INPUTS, outputs, latents: LATENTS }
    }

    struct Case {
        objective: Objective,
        parameters: Vec<Vec<f64>>,
        x: Vec<f64>,
        y: Vec<f64>,
        dead: Vec<bool>,
    }

    impl Case {
        fn new(kind: DictionaryKind) -> Self {
            let objective = objective(kind);
            let mut generator = RandomStream::new(5);
            let mut noise = |count: usize, scale: f64| -> Vec<f64> {
                (0..count).map(|_| scale * generator.normal()).collect()
            };
            let Objective { blocks, outputs, .. } = objective;
            let x = noise(blocks * ROWS * INPUTS, 1.0);
            let y = if kind.is_transcoder() { noise(blocks * ROWS * outputs, 1.0) } else { x.clone() };
            let parameters = names(kind).iter().map(|name| match *name {
                "W_enc" => noise(blocks * LATENTS * INPUTS, 0.5),
                "W_dec" => noise(objective.matrices() * LATENTS * outputs, 0.4),
                "b_dec" => noise(blocks * outputs, 0.3),
                "W_skip" => noise(outputs * INPUTS, 0.2),
                // Thresholds around half the magnitude of the values before selection.
                "log_threshold" => noise(LATENTS, 0.3).into_iter().map(|value| value - 0.7).collect(),
                _ => noise(blocks * LATENTS, 0.2),
            });
            let parameters = parameters.collect();
            let dead = (0..blocks * LATENTS).map(|latent| latent % 3 == 0).collect();
            Self { objective, parameters, x, y, dead }
        }

        fn compute(&self) -> Computed<f64> {
            let values: Vec<&[f64]> = self.parameters.iter().map(|values| &values[..]).collect();
            self.objective.compute(Weights::of(&values).unwrap(), (&self.x, &self.y), &self.dead)
        }

        fn encoded(&self, selection: Selection) -> Encoded<f64> {
            let values: Vec<&[f64]> = self.parameters.iter().map(|values| &values[..]).collect();
            self.objective.encode(Weights::of(&values).unwrap(), &self.x, selection)
        }
    }

    impl Encoded<f64> {
        fn values(&self) -> Vec<f64> {
            self.active.iter().flat_map(|active| active.values().iter().copied()).collect()
        }
    }

    fn tensor(values: &[f64], shape: (usize, usize)) -> Result<Tensor> {
        Tensor::from_slice(values, shape, &Device::Cpu)
    }

    fn is_positive(_: usize, value: f64) -> bool {
        value > 0.0
    }

    /// Returns a mask with ones at the `count` largest allowed values of each row.
    fn mask(before: &Tensor, count: usize, is_allowed: impl Fn(usize, f64) -> bool) -> Result<Tensor> {
        let rows = before.to_vec2::<f64>()?;
        let of_row = |row: &Vec<f64>| {
            (0..row.len())
                .map(|place| {
                    let larger = (0..row.len())
                        .filter(|other| is_allowed(*other, row[*other]) && row[*other] > row[place]);
                    f64::from(u8::from(is_allowed(place, row[place]) && larger.count() < count))
                })
                .collect::<Vec<_>>()
        };
        Tensor::new(rows.iter().map(of_row).collect::<Vec<_>>(), &Device::Cpu)
    }

    /// Splits values into one tensor `(rows, width)` per block.
    fn of_blocks(values: &Tensor, blocks: usize) -> Result<Vec<Tensor>> {
        let rows = values.dim(0)? / blocks;
        (0..blocks).map(|block| values.narrow(0, block * rows, rows)).collect()
    }

    /// Computes a reference loss and gradients with dense matrices and candle's operations.
    ///
    /// JumpReLU's threshold gradients are computed separately. Values of blocks are concatenated. The dense decoder
    /// has zeros between a block and the outputs of earlier blocks.
    fn reference(case: &Case) -> Result<(f64, Vec<Vec<f64>>)> {
        let Case { objective, parameters, x, y, dead } = case;
        let Objective { kind, k, sparsity, blocks, inputs, outputs, latents } = *objective;
        let shape = |name: &str| match name {
            "W_enc" => (blocks * latents, inputs),
            "W_dec" => (blocks * (blocks + 1) / 2 * latents, outputs),
            "W_skip" => (outputs, inputs),
            "b_dec" => (1, blocks * outputs),
            _ => (1, blocks * latents),
        };
        let variables = names(kind)
            .iter()
            .zip(parameters)
            .map(|(name, values)| Var::from_tensor(&tensor(values, shape(name))?));
        let variables = variables.collect::<Result<Vec<_>>>()?;
        let [encoder, encoder_bias, decoder, decoder_bias] =
            [0, 1, 2, 3].map(|index| variables[index].as_tensor());
        let mut matrices = of_blocks(decoder, blocks * (blocks + 1) / 2)?.into_iter();
        let zeros = Tensor::zeros((latents, outputs), DType::F64, &Device::Cpu)?;
        let sources = (0..blocks).map(|block| {
            let written = (0..blocks).map(|target| if target < block { None } else { matrices.next() });
            let written = written.map(|matrix| matrix.unwrap_or_else(|| zeros.clone()));
            Tensor::cat(&written.collect::<Vec<_>>(), 1)
        });
        let decoder = Tensor::cat(&sources.collect::<Result<Vec<_>>>()?, 0)?; // (L · F, L · D)
        let (x, y) = (tensor(x, (blocks * ROWS, inputs))?, tensor(y, (blocks * ROWS, outputs))?);
        let y = Tensor::cat(&of_blocks(&y, blocks)?, 1)?; // (N, L · D)
        let centered = if kind.is_transcoder() { x.clone() } else { x.broadcast_sub(decoder_bias)? };
        let own = of_blocks(&centered, blocks)?.into_iter().zip(of_blocks(encoder, blocks)?);
        let own = own.map(|(centered, encoder)| centered.matmul(&encoder.t()?));
        let own = Tensor::cat(&own.collect::<Result<Vec<_>>>()?, 1)?; // (N, L · F)
        let before = own.broadcast_add(encoder_bias)?;
        let fixed = before.detach();
        let variance = y.broadcast_sub(&y.mean_keepdim(0)?)?.sqr()?.sum_all()?;
        let positive = fixed.gt(0f64)?.to_dtype(DType::F64)?;
        let mut loss = Tensor::new(0f64, &Device::Cpu)?;
        let mut of_thresholds = None;
        let chosen = match kind {
            DictionaryKind::TopK => mask(&fixed, k, is_positive)?,
            DictionaryKind::BatchTopK
            | DictionaryKind::Matryoshka
            | DictionaryKind::Transcoder
            | DictionaryKind::SkipTranscoder
            | DictionaryKind::CrossLayerTranscoder => {
                let all = fixed.reshape((1, ROWS * blocks * latents))?;
                mask(&all, k * ROWS, is_positive)?.reshape((ROWS, blocks * latents))?
            }
            DictionaryKind::JumpRelu => {
                fixed.broadcast_gt(&variables[4].exp()?.detach())?.to_dtype(DType::F64)?
            }
            DictionaryKind::Gated | DictionaryKind::Standard => positive.clone(),
        };
        let values = match kind {
            DictionaryKind::Gated => {
                let [scale, bias] = [4, 5].map(|index| variables[index].as_tensor());
                let sizes = own.broadcast_mul(&scale.exp()?)?.broadcast_add(bias)?.relu()?;
                let gates = before.relu()?;
                loss = ((loss + gates.sum_all()?)? * (sparsity / ROWS as f64 / (outputs as f64).sqrt()))?;
                let alone = gates.matmul(&decoder.detach())?.broadcast_add(&decoder_bias.detach())?;
                loss = (loss + ((alone - &y)?.sqr()?.sum_all()? / &variance)?)?;
                sizes
            }
            _ => before.clone(),
        };
        let active = (values * &chosen)?;
        let mut output = active.matmul(&decoder)?.broadcast_add(decoder_bias)?;
        if kind == DictionaryKind::SkipTranscoder {
            output = (output + x.matmul(&variables[4].t()?)?)?;
        }
        let error = (&output - &y)?;
        if kind == DictionaryKind::Matryoshka {
            let sizes = [1, 2, 5, 11, LATENTS];
            for size in sizes {
                let first = active.narrow(1, 0, size)?.matmul(&decoder.narrow(0, 0, size)?)?;
                let left = (first.broadcast_add(decoder_bias)? - &y)?;
                loss = (loss + ((left.sqr()?.sum_all()? / &variance)? / sizes.len() as f64)?)?;
            }
        } else {
            loss = (loss + (error.sqr()?.sum_all()? / &variance)?)?;
        }
        if kind == DictionaryKind::Standard {
            let penalty = sparsity / ROWS as f64 / (outputs as f64).sqrt();
            loss = (loss + (active.sum_all()? * penalty)?)?;
        }
        if kind == DictionaryKind::JumpRelu {
            let excess = chosen.sum_all()?.to_scalar::<f64>()? / ROWS as f64 / k as f64 - 1.0;
            // Gradient with respect to each latent's value. It reaches the threshold if the value is nearby.
            let of_values =
                (error.matmul(&decoder.t()?)?.broadcast_div(&variance)? * 2.0)?.to_vec2::<f64>()?;
            let before = fixed.to_vec2::<f64>()?;
            let thresholds = parameters[4].iter().enumerate().map(|(latent, logarithm)| {
                let threshold = logarithm.exp();
                let rows = (0..ROWS).filter(|row| (before[*row][latent] - threshold).abs() < BANDWIDTH / 2.0);
                let of_row = |row: usize| {
                    let of_count = 2.0 * sparsity * excess / k as f64 / ROWS as f64;
                    -(threshold / BANDWIDTH) * of_values[row][latent] - of_count / BANDWIDTH
                };
                threshold * rows.map(of_row).sum::<f64>()
            });
            of_thresholds = Some(thresholds.collect::<Vec<_>>());
            loss = (loss + sparsity * excess * excess)?;
        }
        if objective.learns_from_dead() {
            let masks = (0..blocks).map(|block| {
                let dead = &dead[block * latents..(block + 1) * latents];
                mask(&fixed.narrow(1, block * latents, latents)?, outputs / 2, |latent, _| dead[latent])
            });
            let masks = Tensor::cat(&masks.collect::<Result<Vec<_>>>()?, 1)?;
            let revived = (before * masks)?.matmul(&decoder)?;
            let left = error.detach().neg()?; // e = y − ŷ
            let scale = left.broadcast_sub(&left.mean_keepdim(0)?)?.sqr()?.sum_all()?;
            // A third of the latents are dead: 7 or 8 in each block, which is at least D/2.
            loss = (loss + (((left - revived)?.sqr()?.sum_all()? / scale)? / 32.0)?)?;
        }
        let gradients = loss.backward()?;
        let mut all = Vec::new();
        for variable in &variables {
            all.push(match gradients.get(variable) {
                Some(gradient) => gradient.flatten_all()?.to_vec1::<f64>()?,
                None => of_thresholds.take().unwrap_or_default(),
            });
        }
        Ok((loss.sum_all()?.to_scalar()?, all))
    }

    /// Tolerance for f64 sums of a few products.
    const SAME: f64 = 1e-12;

    #[test]
    fn loss_and_gradients_match_dense_matrices() -> Result<()> {
        for (name, kind) in DictionaryKind::NAMES {
            let case = Case::new(kind);
            let (loss, expected) = reference(&case)?;
            let computed = case.compute();
            assert!((computed.loss - loss).abs() < SAME * loss, "{name}: {} vs. {loss}", computed.loss);
            assert_eq!(computed.gradients.len(), expected.len(), "{name}");
            for ((parameter, found), expected) in names(kind).iter().zip(&computed.gradients).zip(&expected) {
                assert_eq!(found.len(), expected.len(), "{name}: {parameter}");
                assert!(expected.iter().any(|value| *value != 0.0), "{name}: {parameter} learns nothing");
                for (place, (found, expected)) in found.iter().zip(expected).enumerate() {
                    assert!(
                        (found - expected).abs() < SAME,
                        "{name}: {parameter}[{place}]: {found} vs. {expected}"
                    );
                }
            }
        }
        Ok(())
    }

    /// Covers kinds whose gradient is exact while the selection is constant, without dead latents.
    #[test]
    fn gradient_matches_finite_differences() {
        const STEP: f64 = 1e-6;
        // JumpReLU's gradient is an estimate. The gated loss treats the decoder as constant in one term, so
        // its slope also differs from the gradient.
        let estimated = [DictionaryKind::JumpRelu, DictionaryKind::Gated];
        for (name, kind) in DictionaryKind::NAMES.into_iter().filter(|(_, kind)| !estimated.contains(kind)) {
            let mut case = Case::new(kind);
            case.dead.fill(false);
            let gradients = case.compute().gradients;
            for (parameter, gradient) in gradients.iter().enumerate() {
                for place in (0..gradient.len()).step_by(5) {
                    let mut loss_at = |change: f64| {
                        let before = case.parameters[parameter][place];
                        case.parameters[parameter][place] = before + change;
                        let loss = case.compute().loss;
                        case.parameters[parameter][place] = before;
                        loss
                    };
                    let slope = (loss_at(STEP) - loss_at(-STEP)) / (2.0 * STEP);
                    // Tolerance for the loss's rounding error divided by the step size.
                    assert!((slope - gradient[place]).abs() < 1e-8, "{name}: {parameter}[{place}]: {slope}");
                }
            }
        }
    }

    #[test]
    fn selection_activates_the_requested_number_of_latents() {
        let top_k = Case::new(DictionaryKind::TopK).encoded(Selection::Training);
        for row in 0..ROWS {
            let kept: Vec<(usize, f64)> = top_k.active[0].row(row).collect();
            assert_eq!(kept.len(), 4);
            let min_kept = kept.iter().map(|(_, value)| *value).fold(f64::INFINITY, f64::min);
            let before = &top_k.before[row * LATENTS..(row + 1) * LATENTS];
            assert_eq!(before.iter().filter(|value| **value >= min_kept).count(), 4, "the largest");
        }
        for kind in
            [DictionaryKind::BatchTopK, DictionaryKind::SkipTranscoder, DictionaryKind::CrossLayerTranscoder]
        {
            let case = Case::new(kind);
            let wanted = case.objective.k * ROWS;
            let batch = case.encoded(Selection::Training);
            assert_eq!(batch.values().len(), wanted);
            let min_kept = batch.min_kept.unwrap();
            // Outside training, all values above the threshold are active, which excludes the smallest kept
            // one.
            assert_eq!(case.encoded(Selection::Use(min_kept)).values().len(), wanted - 1);
        }
        // If there are fewer positive values than wanted, all of them are kept.
        let mut case = Case::new(DictionaryKind::BatchTopK);
        case.objective.k = LATENTS;
        let positive = case.encoded(Selection::Training);
        assert_eq!(positive.values().len(), positive.before.iter().filter(|value| **value > 0.0).count());
        // The first values win a tie.
        assert_eq!(largest(&[1.0, 2.0, 2.0, -1.0, 2.0], 2, is_positive), [(1, 2.0), (2, 2.0)]);
        assert_eq!(largest(&[1.0, 2.0, -3.0, -1.0], 1, |place, _| place > 1), [(3, -1.0)]);
        let objective = Objective { latents: 3, k: 1, ..objective(DictionaryKind::BatchTopK) };
        let (kept, min_kept) = objective.largest_of_batch(&[5.0, 1.0, 1.0, 1.0, 0.0, 2.0]);
        let kept = &kept[0];
        assert_eq!((kept.columns(), kept.values(), min_kept), (&[0, 2][..], &[5.0, 2.0][..], Some(2.0)));
    }
}
