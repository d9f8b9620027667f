//! Brute-force circuits: a plain f64 model in which every edge mixes clean and corrupted values.
//!
//! The mixing fraction is separate for every edge and every pair of positions.

use candle_core::{DType, Tensor};
use candle_gpt2::{Gpt2LMHeadModel, LayerNorm, Linear, QkvProjection};
use candle_gpt2_interpret::{Edge, EdgeDestination, EdgeGraph, EdgeSource, EdgeSpans, Head, PromptPair};

type Vector = Vec<f64>;
/// Output of each source at each position.
type Written = Vec<Vec<Vector>>;

fn vector(tensor: &Tensor) -> Vector {
    tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Weight rows and bias.
struct Layer(Vec<Vector>, Vector);

impl Layer {
    fn of(linear: &Linear) -> Self {
        let weight = linear.weight().to_tensor().unwrap().to_dtype(DType::F64).unwrap();
        let bias = linear.bias().map_or_else(|| vec![0.0; linear.out_features()], vector);
        Self(weight.to_vec2().unwrap(), bias)
    }

    fn forward(&self, x: &[f64]) -> Vector {
        self.0.iter().zip(&self.1).map(|(row, bias)| product(row, x) + bias).collect()
    }
}

fn product(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(sum: &mut [f64], factor: f64, values: &[f64]) {
    sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += factor * value);
}

fn softmax(values: &[f64]) -> Vector {
    let top = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let powers: Vector = values.iter().map(|value| (value - top).exp()).collect();
    let sum: f64 = powers.iter().sum();
    powers.into_iter().map(|power| power / sum).collect()
}

fn gelu_new(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
}

/// Weight, bias, and epsilon added to the variance.
struct Norm(Vector, Vector, f64);

impl Norm {
    fn of(norm: &LayerNorm, epsilon: f64) -> Self {
        Self(vector(norm.weight()), vector(norm.bias().unwrap()), epsilon)
    }

    fn forward(&self, x: &[f64]) -> Vector {
        let mean = x.iter().sum::<f64>() / x.len() as f64;
        let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / x.len() as f64;
        let scaled =
            x.iter().zip(&self.0).map(|(x, weight)| weight * (x - mean) / (variance + self.2).sqrt());
        scaled.zip(&self.1).map(|(x, bias)| x + bias).collect()
    }
}

/// A model whose edges are split by token span.
pub(crate) struct Plain<'a> {
    pub(crate) model: &'a Gpt2LMHeadModel,
    pub(crate) spans: &'a [usize],
}

impl Plain<'_> {
    /// Runs the model with each edge moved toward its corrupted value by the fraction `share`.
    ///
    /// Returns the logits after the last token and the outputs of the sources.
    fn run(
        &self,
        ids: &[u32],
        corrupted: Option<&Written>,
        share: &dyn Fn(Edge) -> f64,
    ) -> (Vector, Written) {
        let (model, config) = (self.model.transformer(), self.model.config());
        let epsilon = config.layer_norm_epsilon;
        let (heads, width) = (config.n_head, config.n_embd / config.n_head);
        let names: Vec<EdgeSource> = EdgeGraph::of(config).sources().collect();
        let wte = Layer::of(model.wte()).0;
        let mut written: Written = vec![ids.iter().map(|id| wte[*id as usize].clone()).collect()];
        let wpe: Vec<Vector> = model.wpe().to_dtype(DType::F64).unwrap().to_vec2().unwrap();
        let mut fixed = wpe[..ids.len()].to_vec();
        // Input of a destination at position `from`, used at position `to`.
        let read = |written: &Written, fixed: &[Vector], destination, (from, to): (usize, usize)| {
            let spans = EdgeSpans { source: self.spans[from], destination: self.spans[to] };
            let mut sum = fixed[from].clone();
            for (place, of_source) in written.iter().enumerate() {
                let share = share(Edge { source: names[place], destination, spans });
                add(&mut sum, 1.0 - share, &of_source[from]);
                if let Some(corrupted) = corrupted {
                    add(&mut sum, share, &corrupted[place][from]);
                }
            }
            sum
        };
        for (layer, block) in model.blocks().iter().enumerate() {
            let QkvProjection::Fused(qkv) = block.attn().projection() else { panic!("one matrix") };
            let (qkv, output) = (Layer::of(qkv), Layer::of(block.attn().out_proj()));
            let mut scale = 1.0 / (width as f64).sqrt();
            if config.scale_attn_by_inverse_layer_idx {
                scale /= (layer + 1) as f64;
            }
            let [ln_1, ln_2] = [block.ln_1(), block.ln_2()].map(|norm| Norm::of(norm, epsilon));
            let mut of_heads = Vec::new();
            for head in 0..heads {
                let name = Head { layer, head };
                let part = |part: usize, destination, places| {
                    let x = ln_1.forward(&read(&written, &fixed, destination, places));
                    let first = (part * heads + head) * width;
                    let row = |row: usize| product(&qkv.0[row], &x) + qkv.1[row];
                    (first..first + width).map(row).collect::<Vector>()
                };
                let of_position = |to: usize| {
                    let query = part(0, EdgeDestination::Query(name), (to, to));
                    let keys = (0..=to).map(|from| part(1, EdgeDestination::Key(name), (from, to)));
                    let scores: Vector = keys.map(|key| scale * product(&query, &key)).collect();
                    let mut z = vec![0.0; width];
                    for (from, weight) in softmax(&scores).into_iter().enumerate() {
                        add(&mut z, weight, &part(2, EdgeDestination::Value(name), (from, to)));
                    }
                    let columns = head * width..(head + 1) * width;
                    output.0.iter().map(|row| product(&row[columns.clone()], &z)).collect::<Vector>()
                };
                of_heads.push((0..ids.len()).map(of_position).collect());
            }
            written.extend(of_heads);
            fixed.iter_mut().for_each(|fixed| add(fixed, 1.0, &output.1));
            let (expand, contract) = (Layer::of(block.mlp().expand()), Layer::of(block.mlp().contract()));
            let of_mlp = |at: usize| {
                let x = read(&written, &fixed, EdgeDestination::Mlp(layer), (at, at));
                let inner = expand.forward(&ln_2.forward(&x));
                contract.forward(&inner.into_iter().map(gelu_new).collect::<Vector>())
            };
            let of_mlp = (0..ids.len()).map(of_mlp).collect();
            written.push(of_mlp);
        }
        let last = ids.len() - 1;
        let x = read(&written, &fixed, EdgeDestination::Logits, (last, last));
        (Layer::of(self.model.lm_head()).forward(&Norm::of(model.ln_f(), epsilon).forward(&x)), written)
    }

    /// Logit difference of a pair with one correct and one incorrect answer.
    pub(crate) fn value(&self, pair: &PromptPair, share: &dyn Fn(Edge) -> f64) -> f64 {
        let (_, corrupted) = self.run(&pair.corrupted, None, &|_| 0.0);
        let (logits, _) = self.run(&pair.clean, Some(&corrupted), share);
        logits[pair.correct[0] as usize] - logits[pair.incorrect[0] as usize]
    }
}
