//! The loss of a dictionary on a batch, and its gradient: by hand, so that the decoder's rows of active latents alone are read.
//!
//! With `xc = x − b_dec` (of a transcoder `xc = x`) and `a = xc W_encᵀ + b_enc`, a few entries of `a` become the latents `z`; then
//! `ŷ = z W_dec + b_dec (+ x W_skipᵀ)`, and the loss is `‖ŷ − y‖² / ‖y − mean y‖²` over the batch, the share of variance that is not
//! explained, and what follows of the kind:
//!
//! ```text
//! top-k, batch-top-k   1/32 · min(dead / (D/2), 1) · ‖e − ê‖² / ‖e − mean e‖²: e = y − ŷ, a constant; ê = â W_dec of the D/2 largest
//!                      a of dead latents, also of negative ones, as in SAELens
//! JumpReLU             λ (L0 / k − 1)², z = a · 1[a > θ]; over the width ω around θ, ∂z/∂θ = −θ/ω and ∂1[a > θ]/∂θ = −1/ω
//! gated                λ mean Σ π₊ / √C, and ‖π₊ W_dec + b_dec − y‖² / ‖y − mean y‖² in which W_dec and b_dec are constants;
//!                      π = a opens the gates, and z = 1[π > 0] · (exp(r) · (a − b_enc) + b_mag)₊
//! ```
//!
//! Gradients of a selection are those of what it selects. Matrices have a row for each latent: `W_enc` is `(F, C)`, the transpose of
//! SAELens'.

use candle_gpt2_kernels::{Float, MatrixView, SparseRows, map_items};

use super::DictionaryKind;

/// What dead latents count in the loss.
const AUXILIARY_SHARE: f64 = 1.0 / 32.0;
/// Width around a threshold in which it learns, in deviations of the input: JumpReLU's bandwidth.
pub(super) const BANDWIDTH: f64 = 0.1;
/// Rows that one task selects the latents of.
const PART_ROWS: usize = 16;

/// The parameters of a dictionary, in the order in which the trainer holds them.
#[derive(Clone, Copy)]
pub(super) struct Weights<'a, T> {
    /// `(F, C)`.
    pub(super) encoder: &'a [T],
    /// `(F)`.
    pub(super) encoder_bias: &'a [T],
    /// `(F, D)`.
    pub(super) decoder: &'a [T],
    /// `(D)`.
    pub(super) decoder_bias: &'a [T],
    /// Of the kind: the logarithm of the thresholds `(F)`; `r` and `b_mag` `(F)`; the skip connection `(D, C)`.
    pub(super) more: [&'a [T]; 2],
}

/// The names of the parameters of a kind.
pub(super) fn names(kind: DictionaryKind) -> &'static [&'static str] {
    match kind {
        DictionaryKind::TopK | DictionaryKind::BatchTopK | DictionaryKind::Transcoder => {
            &["W_enc", "b_enc", "W_dec", "b_dec"]
        }
        DictionaryKind::JumpRelu => &["W_enc", "b_enc", "W_dec", "b_dec", "log_threshold"],
        DictionaryKind::Gated => &["W_enc", "b_enc", "W_dec", "b_dec", "r_mag", "b_mag"],
        DictionaryKind::SkipTranscoder => &["W_enc", "b_enc", "W_dec", "b_dec", "W_skip"],
    }
}

impl<'a, T> Weights<'a, T> {
    /// The parameters from their values in the order of [`names`], of which there are four at least.
    pub(super) fn of(values: &[&'a [T]]) -> Option<Self> {
        let [encoder, encoder_bias, decoder, decoder_bias, more @ ..] = values else { return None };
        let more = [0, 1].map(|index| more.get(index).copied().unwrap_or_default());
        Some(Self { encoder, encoder_bias, decoder, decoder_bias, more })
    }
}

/// What a dictionary is, apart from its parameters.
#[derive(Debug, Clone, Copy)]
pub(super) struct Objective {
    pub(super) kind: DictionaryKind,
    pub(super) k: usize,
    pub(super) sparsity: f64,
    /// Width of the input, `C`.
    pub(super) inputs: usize,
    /// Width of the output, `D`.
    pub(super) outputs: usize,
    /// Latents, `F`.
    pub(super) latents: usize,
}

/// Whether latents are chosen as in training, or as in use.
#[derive(Debug, Clone, Copy)]
pub(super) enum Selection {
    Training,
    /// With the running threshold, if the kind has one.
    Use(f64),
}

/// What a dictionary makes of some rows.
pub(super) struct Encoded<T> {
    /// `xc`, `(N, C)`.
    centred: Vec<T>,
    /// `a`, `(N, F)`.
    before: Vec<T>,
    /// The latents; of JumpReLU in training also, with 0, those that are near their threshold and below it.
    pub(super) active: SparseRows<T>,
    /// `ŷ`, `(N, D)`.
    pub(super) output: Vec<T>,
    /// The least value that was kept, where the largest were.
    least: Option<f64>,
}

/// The loss of a batch and what comes with it.
pub(super) struct Computed<T> {
    pub(super) loss: f64,
    /// In the order of the parameters.
    pub(super) gradients: Vec<Vec<T>>,
    /// Which latents were active in any row.
    pub(super) fired: Vec<bool>,
    /// The least value that was kept, where the largest were.
    pub(super) least: Option<f64>,
}

impl Objective {
    /// Latents and output of rows, `(N, C)`.
    pub(super) fn encode<T: Float>(
        &self,
        weights: Weights<'_, T>,
        x: &[T],
        selection: Selection,
    ) -> Encoded<T> {
        let Self { inputs, outputs, latents, .. } = *self;
        let rows = x.len() / inputs;
        let mut centred = x.to_vec();
        if !self.kind.is_transcoder() {
            for row in centred.chunks_mut(inputs) {
                row.iter_mut().zip(weights.decoder_bias).for_each(|(value, bias)| *value -= *bias);
            }
        }
        let encoder = MatrixView::new(weights.encoder, latents, inputs);
        let before = T::product(
            MatrixView::new(&centred, rows, inputs),
            encoder.transposed(),
            Some(weights.encoder_bias),
        );
        let (active, least) = self.select(weights, &before, selection);
        let mut output = weights.decoder_bias.repeat(rows);
        if self.kind == DictionaryKind::SkipTranscoder {
            let skip = MatrixView::new(weights.more[0], outputs, inputs);
            T::product_to(MatrixView::new(x, rows, inputs), skip.transposed(), &mut output, false);
        }
        T::add_sparse_product(&active, MatrixView::new(weights.decoder, latents, outputs), &mut output);
        Encoded { centred, before, active, output, least }
    }

    /// The latents of values before their selection, and the least that was kept.
    fn select<T: Float>(
        &self,
        weights: Weights<'_, T>,
        before: &[T],
        selection: Selection,
    ) -> (SparseRows<T>, Option<f64>) {
        let in_training = matches!(selection, Selection::Training);
        match (self.kind, selection) {
            (DictionaryKind::TopK, _) => {
                (self.each_row(before, |row| largest(row, self.k, |_, value| value > T::ZERO)), None)
            }
            (DictionaryKind::JumpRelu, _) => {
                let of_row = |row: &[T]| {
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
                let of_row = |row: &[T]| {
                    let open = row.iter().enumerate().filter(|(_, value)| **value > T::ZERO);
                    open.map(|(place, value)| (place, self.magnitude(weights, place, *value))).collect()
                };
                (self.each_row(before, of_row), None)
            }
            (_, Selection::Use(threshold)) => {
                let threshold = T::of(threshold.max(0.0));
                let of_row = |row: &[T]| {
                    let above = row.iter().copied().enumerate();
                    above.filter(|(_, value)| *value > threshold).collect()
                };
                (self.each_row(before, of_row), None)
            }
            (_, Selection::Training) => self.largest_of_batch(before),
        }
    }

    /// The size of a latent whose gate has this value, which is greater than 0.
    fn magnitude<T: Float>(&self, weights: Weights<'_, T>, latent: usize, gate: T) -> T {
        let [scale, bias] = weights.more;
        let own = gate - weights.encoder_bias[latent];
        let size = own * T::of(libm::exp(scale[latent].to_f64())) + bias[latent];
        if size > T::ZERO { size } else { T::ZERO }
    }

    fn each_row<T: Float>(
        &self,
        before: &[T],
        of_row: impl Fn(&[T]) -> Vec<(usize, T)> + Sync,
    ) -> SparseRows<T> {
        let parts = before.chunks(PART_ROWS * self.latents);
        let selected = map_items(parts, |part| part.chunks(self.latents).map(&of_row).collect::<Vec<_>>());
        let mut rows = SparseRows::default();
        selected.into_iter().flatten().for_each(|entries| rows.add_row(entries));
        rows
    }

    /// The largest positive values of all rows together, `k` for each row; of equals the first.
    fn largest_of_batch<T: Float>(&self, before: &[T]) -> (SparseRows<T>, Option<f64>) {
        let wanted = self.k * (before.len() / self.latents);
        let mut positive: Vec<T> = before.iter().copied().filter(|value| *value > T::ZERO).collect();
        if positive.len() <= wanted {
            let least = positive.iter().map(|value| value.to_f64()).reduce(f64::min);
            let of_row =
                |row: &[T]| row.iter().copied().enumerate().filter(|(_, value)| *value > T::ZERO).collect();
            return (self.each_row(before, of_row), least);
        }
        let (above, cut, _) =
            positive.select_nth_unstable_by(wanted - 1, |a, b| b.to_f64().total_cmp(&a.to_f64()));
        let cut = *cut;
        let mut equals = wanted - above.iter().filter(|value| **value > cut).count();
        let mut rows = SparseRows::default();
        for row in before.chunks(self.latents) {
            let kept = row.iter().copied().enumerate().filter(|(_, value)| {
                let is_equal = *value == cut && equals > 0;
                equals -= usize::from(is_equal);
                *value > cut || is_equal
            });
            rows.add_row(kept);
        }
        (rows, Some(cut.to_f64()))
    }

    /// The loss of `x` `(N, C)` with `y` `(N, D)` to be written, and its gradients. `dead` tells the latents that are to explain what the
    /// others leave.
    pub(super) fn compute<T: Float>(
        &self,
        weights: Weights<'_, T>,
        (x, y): (&[T], &[T]),
        dead: &[bool],
    ) -> Computed<T> {
        let Self { inputs, outputs, latents, .. } = *self;
        let rows = x.len() / inputs;
        let encoded = self.encode(weights, x, Selection::Training);
        let Encoded { centred, before, active, output, least } = &encoded;
        let decoder = MatrixView::new(weights.decoder, latents, outputs);

        let variance = deviations(y, outputs);
        let of_variance = if variance > 0.0 { 1.0 / variance } else { 1.0 };
        let mut error: Vec<T> = output.clone();
        error.iter_mut().zip(y).for_each(|(output, y)| *output -= *y); // ŷ − y
        let mut loss = squares(&error) * of_variance;
        let mut output_gradient = error.clone();
        T::scale(&mut output_gradient, 2.0 * of_variance);
        let gradient = MatrixView::new(&output_gradient, rows, outputs); // of ŷ

        let mut sums = Gradients::new(self, weights);
        T::add_sparse_gradient(active, gradient, &mut sums.decoder);
        T::sum_columns(&output_gradient, &mut sums.decoder_bias, true);
        if self.kind == DictionaryKind::SkipTranscoder {
            T::product_to(gradient.transposed(), MatrixView::new(x, rows, inputs), &mut sums.more[0], true);
        }
        let of_latents = T::sparse_products(active, gradient, decoder);
        let centred = MatrixView::new(centred, rows, inputs);
        match self.kind {
            DictionaryKind::JumpRelu => {
                loss += self.jump(weights, &encoded, &of_latents, &mut sums, centred);
            }
            DictionaryKind::Gated => {
                loss += self.gate(weights, &encoded, (y, of_variance), &of_latents, &mut sums, centred);
            }
            _ => sums.encode(&active.with_values(of_latents), centred),
        }

        if self.learns_from_dead() && dead.contains(&true) {
            let most = (outputs / 2).max(1);
            let revived = self.each_row(before, |row| largest(row, most, |latent, _| dead[latent]));
            let count = dead.iter().filter(|dead| **dead).count();
            let share = AUXILIARY_SHARE * (count as f64 / most as f64).min(1.0);
            // e − ê with e = y − ŷ, and so minus that: ê + (ŷ − y).
            let scale = deviations(&error, outputs);
            let of_scale = if scale > 0.0 { share / scale } else { 0.0 };
            let mut left = error;
            T::add_sparse_product(&revived, decoder, &mut left);
            loss += squares(&left) * of_scale;
            T::scale(&mut left, 2.0 * of_scale);
            let gradient = MatrixView::new(&left, rows, outputs);
            T::add_sparse_gradient(&revived, gradient, &mut sums.decoder);
            let of_revived = T::sparse_products(&revived, gradient, decoder);
            sums.encode(&revived.with_values(of_revived), centred);
        }
        if !self.kind.is_transcoder() {
            // The input is taken less the output's bias.
            let mut back = std::mem::take(&mut sums.before);
            T::scale(&mut back, -1.0);
            let encoder = MatrixView::new(weights.encoder, latents, inputs);
            T::product_to(MatrixView::new(&back, 1, latents), encoder, &mut sums.decoder_bias, false);
        }

        let mut fired = vec![false; latents];
        for (latent, value) in active.columns().iter().zip(active.values()) {
            fired[*latent] |= *value > T::ZERO;
        }
        let least = *least;
        Computed { loss, gradients: sums.in_order(self.kind), fired, least }
    }

    /// The least of the largest values of all rows, `k` for each.
    pub(super) fn least<T: Float>(&self, weights: Weights<'_, T>, x: &[T]) -> Option<f64> {
        self.encode(weights, x, Selection::Training).least
    }

    /// Whether dead latents get a loss of their own.
    fn learns_from_dead(&self) -> bool {
        self.kind == DictionaryKind::TopK || self.kind.has_running_threshold()
    }

    /// The way back through JumpReLU, and the loss of sparsity.
    fn jump<T: Float>(
        &self,
        weights: Weights<'_, T>,
        encoded: &Encoded<T>,
        of_latents: &[T],
        sums: &mut Gradients<T>,
        centred: MatrixView<'_, T>,
    ) -> f64 {
        let active = &encoded.active;
        let (rows, wanted) = (active.rows() as f64, self.k as f64);
        let count = active.values().iter().filter(|value| **value > T::ZERO).count();
        let excess = count as f64 / rows / wanted - 1.0;
        // Of each ∂1[a > θ]/∂θ.
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
                    // Of its logarithm.
                    sums.more[0][latent] += T::of(of_threshold * threshold);
                }
            }
        }
        sums.encode(&active.with_values(back), centred);
        self.sparsity * excess * excess
    }

    /// The way back through gates and sizes, the loss of sparsity, and that of what the gates alone write.
    fn gate<T: Float>(
        &self,
        weights: Weights<'_, T>,
        encoded: &Encoded<T>,
        (y, of_variance): (&[T], f64),
        of_latents: &[T],
        sums: &mut Gradients<T>,
        centred: MatrixView<'_, T>,
    ) -> f64 {
        let active = &encoded.active;
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
        sums.multiply(&active.with_values(back), centred);
        loss
    }
}

/// Gradients as they are added up.
struct Gradients<T> {
    encoder: Vec<T>,
    encoder_bias: Vec<T>,
    /// Of `xc W_encᵀ`, summed over the rows.
    before: Vec<T>,
    decoder: Vec<T>,
    decoder_bias: Vec<T>,
    more: [Vec<T>; 2],
}

impl<T: Float> Gradients<T> {
    fn new(objective: &Objective, weights: Weights<'_, T>) -> Self {
        let zeros = |like: &[T]| vec![T::ZERO; like.len()];
        Self {
            encoder: zeros(weights.encoder),
            encoder_bias: zeros(weights.encoder_bias),
            before: vec![T::ZERO; objective.latents],
            decoder: zeros(weights.decoder),
            decoder_bias: zeros(weights.decoder_bias),
            more: weights.more.map(zeros),
        }
    }

    /// Adds what gradients of some entries of `xc W_encᵀ` are for the encoder.
    fn multiply(&mut self, entries: &SparseRows<T>, centred: MatrixView<'_, T>) {
        T::add_sparse_gradient(entries, centred, &mut self.encoder);
        for (latent, value) in entries.columns().iter().zip(entries.values()) {
            self.before[*latent] += *value;
        }
    }

    /// The same of entries of `a`, and so for its bias too.
    fn encode(&mut self, entries: &SparseRows<T>, centred: MatrixView<'_, T>) {
        self.multiply(entries, centred);
        for (latent, value) in entries.columns().iter().zip(entries.values()) {
            self.encoder_bias[*latent] += *value;
        }
    }

    fn in_order(self, kind: DictionaryKind) -> Vec<Vec<T>> {
        let [first, second] = self.more;
        let all = [self.encoder, self.encoder_bias, self.decoder, self.decoder_bias, first, second];
        all.into_iter().take(names(kind).len()).collect()
    }
}

/// The `count` largest values of a row among the allowed ones, in the order of their places; of equals the first.
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

/// The sum of the squares.
pub(super) fn squares<T: Float>(values: &[T]) -> f64 {
    values.iter().map(|value| value.to_f64() * value.to_f64()).sum()
}

/// The sum of the squared distances of rows from their mean.
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
    use candle_gpt2_kernels::RandomStream;

    use super::*;

    const ROWS: usize = 11;
    const INPUTS: usize = 6;
    const LATENTS: usize = 23;

    fn objective(kind: DictionaryKind) -> Objective {
        // A transcoder writes another width than it reads.
        let outputs = if kind.is_transcoder() { 9 } else { INPUTS };
        Objective { kind, k: 4, sparsity: 0.7, inputs: INPUTS, outputs, latents: LATENTS }
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
            let outputs = objective.outputs;
            let x = noise(ROWS * INPUTS, 1.0);
            let y = if kind.is_transcoder() { noise(ROWS * outputs, 1.0) } else { x.clone() };
            let parameters = names(kind).iter().map(|name| match *name {
                "W_enc" => noise(LATENTS * INPUTS, 0.5),
                "W_dec" => noise(LATENTS * outputs, 0.4),
                "b_dec" => noise(outputs, 0.3),
                "W_skip" => noise(outputs * INPUTS, 0.2),
                // Thresholds around half the size of what comes before them.
                "log_threshold" => noise(LATENTS, 0.3).into_iter().map(|value| value - 0.7).collect(),
                _ => noise(LATENTS, 0.2),
            });
            let parameters = parameters.collect();
            let dead = (0..LATENTS).map(|latent| latent % 3 == 0).collect();
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

    fn tensor(values: &[f64], shape: (usize, usize)) -> Result<Tensor> {
        Tensor::from_slice(values, shape, &Device::Cpu)
    }

    fn is_positive(_: usize, value: f64) -> bool {
        value > 0.0
    }

    /// One where a value is among the `count` largest ones of its row that are allowed.
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

    /// The loss from dense matrices and candle's operations, and, of JumpReLU, what the thresholds get.
    fn reference(case: &Case) -> Result<(f64, Vec<Vec<f64>>)> {
        let Case { objective, parameters, x, y, dead } = case;
        let Objective { kind, k, sparsity, inputs, outputs, latents } = *objective;
        let shape = |name: &str| match name {
            "W_enc" => (latents, inputs),
            "W_dec" => (latents, outputs),
            "W_skip" => (outputs, inputs),
            "b_dec" => (1, outputs),
            _ => (1, latents),
        };
        let variables = names(kind)
            .iter()
            .zip(parameters)
            .map(|(name, values)| Var::from_tensor(&tensor(values, shape(name))?));
        let variables = variables.collect::<Result<Vec<_>>>()?;
        let [encoder, encoder_bias, decoder, decoder_bias] =
            [0, 1, 2, 3].map(|index| variables[index].as_tensor());
        let (x, y) = (tensor(x, (ROWS, inputs))?, tensor(y, (ROWS, outputs))?);
        let centred = if kind.is_transcoder() { x.clone() } else { x.broadcast_sub(decoder_bias)? };
        let own = centred.matmul(&encoder.t()?)?;
        let before = own.broadcast_add(encoder_bias)?;
        let fixed = before.detach();
        let variance = y.broadcast_sub(&y.mean_keepdim(0)?)?.sqr()?.sum_all()?;
        let positive = fixed.gt(0f64)?.to_dtype(DType::F64)?;
        let mut loss = Tensor::new(0f64, &Device::Cpu)?;
        let mut of_thresholds = None;
        let chosen = match kind {
            DictionaryKind::TopK => mask(&fixed, k, is_positive)?,
            DictionaryKind::BatchTopK | DictionaryKind::Transcoder | DictionaryKind::SkipTranscoder => {
                let all = fixed.reshape((1, ROWS * latents))?;
                mask(&all, k * ROWS, is_positive)?.reshape((ROWS, latents))?
            }
            DictionaryKind::JumpRelu => {
                fixed.broadcast_gt(&variables[4].exp()?.detach())?.to_dtype(DType::F64)?
            }
            DictionaryKind::Gated => positive.clone(),
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
        let mut output = active.matmul(decoder)?.broadcast_add(decoder_bias)?;
        if kind == DictionaryKind::SkipTranscoder {
            output = (output + x.matmul(&variables[4].t()?)?)?;
        }
        let error = (&output - &y)?;
        loss = (loss + (error.sqr()?.sum_all()? / &variance)?)?;
        if kind == DictionaryKind::JumpRelu {
            let excess = chosen.sum_all()?.to_scalar::<f64>()? / ROWS as f64 / k as f64 - 1.0;
            // What each latent's value gets, and so its threshold where the value is near.
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
            let revived = (before * mask(&fixed, outputs / 2, |latent, _| dead[latent])?)?.matmul(decoder)?;
            let left = error.detach().neg()?; // e = y − ŷ
            let scale = left.broadcast_sub(&left.mean_keepdim(0)?)?.sqr()?.sum_all()?;
            // 8 of 23 latents are dead: at least D/2.
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

    /// Sums of few products in f64.
    const SAME: f64 = 1e-12;

    #[test]
    fn loss_and_gradients_are_those_of_dense_matrices() -> Result<()> {
        for (name, kind) in DictionaryKind::NAMES {
            let case = Case::new(kind);
            let (loss, expected) = reference(&case)?;
            let computed = case.compute();
            assert!((computed.loss - loss).abs() < SAME * loss, "{name}: {} for {loss}", computed.loss);
            assert_eq!(computed.gradients.len(), expected.len(), "{name}");
            for ((parameter, found), expected) in names(kind).iter().zip(&computed.gradients).zip(&expected) {
                assert_eq!(found.len(), expected.len(), "{name}: {parameter}");
                assert!(expected.iter().any(|value| *value != 0.0), "{name}: {parameter} learns nothing");
                for (place, (found, expected)) in found.iter().zip(expected).enumerate() {
                    assert!(
                        (found - expected).abs() < SAME,
                        "{name}: {parameter}[{place}]: {found} for {expected}"
                    );
                }
            }
        }
        Ok(())
    }

    /// Where neither the selection nor what is held fixed changes, and without dead latents.
    #[test]
    fn the_gradient_is_the_slope_of_the_loss() {
        const STEP: f64 = 1e-6;
        // What the gates alone write holds the decoder fixed, so that its slope is not the gradient either.
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
                    // Rounding of the loss over the step.
                    assert!((slope - gradient[place]).abs() < 1e-8, "{name}: {parameter}[{place}]: {slope}");
                }
            }
        }
    }

    #[test]
    fn as_many_latents_are_active_as_are_wanted() {
        let top_k = Case::new(DictionaryKind::TopK).encoded(Selection::Training);
        for row in 0..ROWS {
            let kept: Vec<(usize, f64)> = top_k.active.row(row).collect();
            assert_eq!(kept.len(), 4);
            let least = kept.iter().map(|(_, value)| *value).fold(f64::INFINITY, f64::min);
            let before = &top_k.before[row * LATENTS..(row + 1) * LATENTS];
            assert_eq!(before.iter().filter(|value| **value >= least).count(), 4, "the largest");
        }
        for kind in [DictionaryKind::BatchTopK, DictionaryKind::SkipTranscoder] {
            let case = Case::new(kind);
            let batch = case.encoded(Selection::Training);
            assert_eq!(batch.active.values().len(), 4 * ROWS);
            let least = batch.least.unwrap();
            // In use, what is above the threshold: all of them but the least one.
            assert_eq!(case.encoded(Selection::Use(least)).active.values().len(), 4 * ROWS - 1);
        }
        // Fewer positive values than are wanted are all kept.
        let mut case = Case::new(DictionaryKind::BatchTopK);
        case.objective.k = LATENTS;
        let positive = case.encoded(Selection::Training);
        assert_eq!(
            positive.active.values().len(),
            positive.before.iter().filter(|value| **value > 0.0).count()
        );
        // Equal values: the first ones.
        assert_eq!(largest(&[1.0, 2.0, 2.0, -1.0, 2.0], 2, is_positive), [(1, 2.0), (2, 2.0)]);
        assert_eq!(largest(&[1.0, 2.0, -3.0, -1.0], 1, |place, _| place > 1), [(3, -1.0)]);
        let objective = Objective { latents: 3, k: 1, ..objective(DictionaryKind::BatchTopK) };
        let (kept, least) = objective.largest_of_batch(&[5.0, 1.0, 1.0, 1.0, 0.0, 2.0]);
        assert_eq!((kept.columns(), kept.values(), least), (&[0, 2][..], &[5.0, 2.0][..], Some(2.0)));
    }
}
