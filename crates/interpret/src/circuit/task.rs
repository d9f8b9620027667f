//! Tasks defined by pairs of prompts: edge scores and circuit metrics.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::{DType, Tensor, Var};
use candle_gpt2::{Gpt2LMHeadModel, InitialGradients, LogitsFor, Observer, Pass, Site, SiteKind, gradients};

use super::graph::{Circuit, EdgeGraph, EdgeSpans, Row};
use super::inputs::{
    CircuitRun, HeadGradients, Positions, Span, add_scores, into_heads, into_mlp, places_of_sources, written,
};
use crate::error::Result;
use crate::gradients::{Embeddings, Probes};
use crate::run::{log_softmax, rounded};
use crate::widths::sum_dtype;
use crate::{Chain, InterpretError, Record, Run};

/// Maximum number of tokens per batch; at GPT-2's size, the outputs of 157 sources take 120 MB.
const BATCH_TOKENS: usize = 256;
/// Maximum memory in bytes, for the corrupted runs in [`CircuitTask::acdc`] and for all edges.
const MOST_BYTES: usize = 2 << 30;
/// Bytes per edge: its scores, its flags in circuits and its entry in a report.
const BYTES_OF_EDGE: usize = 1024;

/// Two prompts of equal length, with the answers to compare. [`CircuitTask`] takes a list of pairs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PromptPair {
    /// Clean prompt, to which the correct answers apply.
    pub clean: Vec<u32>,
    /// Corrupted prompt of the same length.
    pub corrupted: Vec<u32>,
    /// Correct answers.
    pub correct: Vec<u32>,
    /// Incorrect answers to compare with.
    pub incorrect: Vec<u32>,
    /// Span index of each token, counted from 0; empty if edges are not split by position.
    pub spans: Vec<usize>,
}

/// Metric of the prediction after the last token. An argument of [`CircuitTask::new`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CircuitMetric {
    /// Mean logit of the correct answers minus the mean logit of the incorrect answers.
    #[default]
    LogitDifference,
    /// Total probability of the correct answers minus the total probability of the incorrect ones.
    ProbabilityDifference,
    /// Kullback-Leibler divergence from the model's prediction, in nats; 0 for the whole model.
    ///
    /// It is summed over the vocabulary.
    Divergence,
}

impl CircuitMetric {
    /// Description of the metric.
    pub fn title(self) -> &'static str {
        match self {
            Self::LogitDifference => "logit difference",
            Self::ProbabilityDifference => "probability difference",
            Self::Divergence => "KL divergence from the model",
        }
    }
}

/// Method for scoring edges. An argument of [`CircuitTask::scores`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EdgeMethod {
    /// Edge attribution patching: the gradient of the clean run (arXiv:2310.10348).
    Eap,
    /// EAP-IG: mean gradient at inputs interpolated from corrupted to clean (arXiv:2403.17806).
    ///
    /// The path starts at the corrupted input and excludes the clean input.
    EapIg {
        /// Number of interpolated inputs, each with one run.
        steps: usize,
    },
    /// Mean of the clean run's gradient and the corrupted run's gradient.
    CleanCorrupted,
}

/// A model and pairs of prompts, for computing edge scores and circuit metrics.
///
/// ```
/// use candle_gpt2_interpret::{Circuit, CircuitMetric, CircuitTask, EdgeMethod, PromptPair, Selection};
/// # use candle_gpt2_weights::{Checkpoint, GivenFiles, LoadOptions, OpenOptions};
/// # let files = GivenFiles::of_bytes("stories", candle_gpt2_stories::FILES);
/// # let checkpoint = Checkpoint::open_given(files, &OpenOptions::default(), &|_| ())?;
/// # let model = checkpoint.load(&LoadOptions::default(), &|_| ())?;
///
/// let (clean, corrupted) = (vec![10, 20, 30, 40], vec![10, 21, 30, 40]);
/// let pair = PromptPair { clean, corrupted, correct: vec![60], incorrect: vec![70], ..PromptPair::default() };
/// let pairs = [pair];
/// let task = CircuitTask::new(&model, &pairs, CircuitMetric::LogitDifference)?;
/// let scores = task.scores(EdgeMethod::EapIg { steps: 5 }, &|_| ())?;
/// assert_eq!(scores.len(), task.graph().edge_count());
/// let circuit = Circuit::selected(task.graph(), &scores, 70, Selection::Greedy)?;
/// let whole = Circuit::whole(task.graph());
/// let values = task.values(&[whole, circuit, Circuit::empty(task.graph())], &|_| ())?;
/// assert!(values[0] != values[2], "the clean prompt and the corrupted prompt");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct CircuitTask<'a> {
    model: &'a Gpt2LMHeadModel,
    pairs: &'a [PromptPair],
    metric: CircuitMetric,
    graph: EdgeGraph,
    /// Batches of pair indices; all pairs in a batch have the same length and the same spans.
    batches: Vec<Vec<usize>>,
}

/// Prompt pairs of equal length, as tensors.
struct Batch {
    /// Clean prompts, `(B, T)`.
    clean: Tensor,
    corrupted: Tensor,
    /// Weight of each token in a metric, `(B, V)`.
    weights: Tensor,
    positions: Positions,
}

/// A batch with the sources' outputs in the corrupted run and the clean prediction.
struct Prepared {
    batch: Batch,
    corrupted: Tensor,
    /// Log probabilities, `(B, V)`.
    reference: Tensor,
}

impl<'a> CircuitTask<'a> {
    /// Creates a task from a model and pairs of prompts.
    ///
    /// # Errors
    /// If `pairs` is empty, or if a pair has prompts of different lengths or no correct answer. If only some
    /// pairs have spans, if a token is outside the vocabulary, or if the spans create more edges than fit
    /// into 2 GiB.
    pub fn new(model: &'a Gpt2LMHeadModel, pairs: &'a [PromptPair], metric: CircuitMetric) -> Result<Self> {
        if pairs.is_empty() {
            return Err(InterpretError::Mismatch("a task needs at least one pair of prompts".into()));
        }
        let has_spans = !pairs[0].spans.is_empty();
        for pair in pairs {
            let (clean, corrupted) = (pair.clean.len(), pair.corrupted.len());
            if clean != corrupted {
                return Err(InterpretError::Lengths { clean, corrupted });
            }
            Run::new(model, &pair.clean)?;
            Run::new(model, &pair.corrupted)?;
            let vocab_size = model.config().vocab_size;
            if let Some(id) =
                pair.correct.iter().chain(&pair.incorrect).find(|id| **id as usize >= vocab_size)
            {
                return Err(InterpretError::UnknownToken { id: *id, vocab_size });
            }
            if pair.correct.is_empty() && metric != CircuitMetric::Divergence {
                return Err(InterpretError::Mismatch("a pair of prompts has no correct answer".into()));
            }
            let expected = if has_spans { clean } else { 0 };
            if pair.spans.len() != expected {
                return Err(InterpretError::Mismatch(format!(
                    "expected {expected} token spans, found {}; give every pair one span per token, or no pair any spans",
                    pair.spans.len()
                )));
            }
            let n_positions = model.config().n_positions;
            if let Some(span) = pair.spans.iter().find(|span| **span >= n_positions) {
                return Err(InterpretError::Mismatch(format!(
                    "span {span} is out of range; expected a number below {n_positions}"
                )));
            }
        }
        let span_count = pairs.iter().flat_map(|pair| &pair.spans).max().map_or(1, |last| last + 1);
        let mut crossings = BTreeSet::new();
        let mut alike: BTreeMap<(usize, &[usize]), Vec<usize>> = BTreeMap::new();
        for (place, pair) in pairs.iter().enumerate() {
            alike.entry((pair.clean.len(), &pair.spans)).or_default().push(place);
        }
        for (_, spans) in alike.keys() {
            let mut before = BTreeSet::new();
            for span in *spans {
                let from = |source: &usize| EdgeSpans { source: *source, destination: *span };
                crossings.extend(before.iter().filter(|source| *source != span).map(from));
                before.insert(*span);
            }
        }
        let batches = alike.into_iter().flat_map(|((tokens, _), places)| {
            places.chunks((BATCH_TOKENS / tokens).max(1)).map(<[usize]>::to_vec).collect::<Vec<_>>()
        });
        let crossing_count = crossings.len();
        let graph = EdgeGraph::of(model.config()).in_spans(span_count, crossings)?;
        let edges = graph.edge_count();
        if edges.saturating_mul(BYTES_OF_EDGE) > MOST_BYTES {
            return Err(InterpretError::Mismatch(format!(
                "{span_count} spans and {crossing_count} pairs of spans create {edges} edges, more than {}; \
                 use fewer spans or shorter prompts",
                MOST_BYTES / BYTES_OF_EDGE
            )));
        }
        Ok(Self { model, pairs, metric, graph, batches: batches.collect() })
    }

    /// Returns the model's edge graph, split by the spans of the pairs.
    pub fn graph(&self) -> &EdgeGraph {
        &self.graph
    }

    /// Estimates, to first order, how much the metric changes if an edge is corrupted.
    ///
    /// An edge that supports the task has a negative score for a difference, and a positive score for a
    /// divergence. The result is the mean over all pairs, in the order of [`EdgeGraph::edges`]. Calls `done`
    /// with the number of finished pairs.
    ///
    /// # Errors
    /// If `steps` is 0, if the method does not support the metric, or if the model fails.
    pub fn scores(&self, method: EdgeMethod, done: &dyn Fn(usize)) -> Result<Vec<f32>> {
        let runs = match method {
            EdgeMethod::EapIg { steps: 0 } => {
                return Err(InterpretError::Mismatch("EAP-IG needs at least 1 step".into()));
            }
            EdgeMethod::Eap if self.metric == CircuitMetric::Divergence => {
                return Err(InterpretError::Mismatch(
                    "the gradient of the divergence is zero at the clean run; use eap-ig or clean-corrupted, \
                     or another metric"
                        .into(),
                ));
            }
            EdgeMethod::Eap => vec![1.0],
            EdgeMethod::CleanCorrupted => vec![0.0, 1.0],
            EdgeMethod::EapIg { steps } => (0..steps).map(|step| step as f64 / steps as f64).collect(),
        };
        let mut sums = vec![0.0; self.graph.edge_count()];
        for places in &self.batches {
            let mut record = Record::new(places_of_sources(self.model.config().n_layer));
            let prepared = self.prepared(places, &mut record)?;
            let clean = written(self.model, &record)?;
            let differences = (&prepared.corrupted - clean)?;
            let mut by_span = Vec::new();
            for span in prepared.batch.positions.spans() {
                by_span.push((span, span.of(&differences)?));
            }
            let embedded = record.get(Site::outside(SiteKind::Embed))?;
            let corrupted = prepared.corrupted.get(0)?.to_dtype(embedded.dtype())?;
            let on_the_way = (embedded - &corrupted)?;
            for share in &runs {
                let embeddings = (&corrupted + (&on_the_way * *share)?)?;
                self.add_scores_of(&prepared, embeddings, &by_span, &mut sums)?;
            }
            done(places.len());
        }
        let count = (self.pairs.len() * runs.len()) as f64;
        Ok(sums.into_iter().map(|sum| rounded(sum / count)).collect())
    }

    /// Computes each circuit's mean metric over all pairs.
    ///
    /// In a circuit's run, only the circuit's edges carry clean activations. Calls `done` with the number of
    /// finished pairs.
    ///
    /// # Errors
    /// If a circuit belongs to another model or has other spans, or if the model fails.
    pub fn values(&self, circuits: &[Circuit], done: &dyn Fn(usize)) -> Result<Vec<f32>> {
        for circuit in circuits {
            let graph = circuit.graph();
            if *graph != self.graph && *graph != EdgeGraph::of(self.model.config()) {
                return Err(InterpretError::Mismatch(format!(
                    "the circuit has {} edges in {} spans, but the task's graph has {} edges in {} spans",
                    graph.edge_count(),
                    graph.span_count(),
                    self.graph.edge_count(),
                    self.graph.span_count()
                )));
            }
        }
        let mut sums = vec![0.0; circuits.len()];
        for places in &self.batches {
            let prepared = self.prepared(places, &mut Chain(Vec::new()))?;
            for (circuit, sum) in circuits.iter().zip(&mut sums) {
                *sum += self.sum(&prepared, circuit, self.metric)?;
            }
            done(places.len());
        }
        Ok(sums.into_iter().map(|sum| rounded(sum / self.pairs.len() as f64)).collect())
    }

    /// Automatic circuit discovery (ACDC): removes unimportant edges, from the logits backward.
    ///
    /// An edge is removed if its removal raises the divergence from the model's prediction by less than
    /// `threshold` nats. Returns the circuit, and the rise in divergence measured for each edge. Calls `done`
    /// after each edge.
    ///
    /// ACDC makes one run for each edge and keeps the outputs of all sources in the corrupted runs. It suits
    /// small models and few pairs.
    ///
    /// Source: "Towards Automated Circuit Discovery for Mechanistic Interpretability" (arXiv:2304.14997).
    ///
    /// # Errors
    /// If the pairs have spans or need too much memory, or if the model fails.
    pub fn acdc(&self, threshold: f32, done: &dyn Fn()) -> Result<(Circuit, Vec<f32>)> {
        let graph = &self.graph;
        let tokens: usize = self.pairs.iter().map(|pair| pair.clean.len()).sum();
        let of_token = graph.source_count() * self.model.config().n_embd * size_of::<f32>();
        if tokens.saturating_mul(of_token) > MOST_BYTES {
            return Err(InterpretError::Mismatch(format!(
                "ACDC needs {of_token} bytes for each of {tokens} tokens, more than {MOST_BYTES} in total; \
                 use fewer pairs"
            )));
        }
        if graph.span_count() > 1 {
            return Err(InterpretError::Mismatch(
                "ACDC does not distinguish edges by position; use pairs without spans".into(),
            ));
        }
        let prepare = |places: &Vec<usize>| self.prepared(places, &mut Chain(Vec::new()));
        let prepared = self.batches.iter().map(prepare).collect::<Result<Vec<_>>>()?;
        let divergence = |circuit: &Circuit| -> Result<f32> {
            let sums = prepared.iter().map(|batch| self.sum(batch, circuit, CircuitMetric::Divergence));
            Ok(rounded(sums.sum::<Result<f64>>()? / self.pairs.len() as f64))
        };
        let (mut circuit, mut rises) = (Circuit::whole(graph), vec![0.0; graph.edge_count()]);
        let mut before = divergence(&circuit)?;
        for row in graph.rows().iter().rev() {
            let is_used = circuit.is_used(row.destination);
            for edge in graph.edges_of(row, EdgeSpans::default()).into_iter().flatten().rev() {
                circuit.set(edge, false);
                if is_used {
                    let after = divergence(&circuit)?;
                    rises[edge] = after - before;
                    if rises[edge] < threshold {
                        before = after;
                    } else {
                        circuit.set(edge, true);
                    }
                }
                done();
            }
        }
        Ok((circuit.connected(), rises))
    }

    fn batch(&self, places: &[usize]) -> Result<Batch> {
        let (device, vocab_size) = (self.model.device(), self.model.config().vocab_size);
        let pairs: Vec<&PromptPair> = places.iter().map(|place| &self.pairs[*place]).collect();
        let tokens = pairs.first().map_or(0, |pair| pair.clean.len());
        let ids = |of: fn(&PromptPair) -> &[u32]| {
            let ids: Vec<u32> = pairs.iter().flat_map(|pair| of(pair)).copied().collect();
            Tensor::from_vec(ids, (pairs.len(), tokens), device)
        };
        let mut weights = vec![0f32; pairs.len() * vocab_size];
        for (pair, weights) in pairs.iter().zip(weights.chunks_mut(vocab_size.max(1))) {
            for (answers, sign) in [(&pair.correct, 1.0), (&pair.incorrect, -1.0)] {
                let share = match self.metric {
                    CircuitMetric::LogitDifference => sign / answers.len() as f32,
                    _ => sign,
                };
                answers.iter().for_each(|id| weights[*id as usize] += share);
            }
        }
        let spans = pairs.first().map_or(&[][..], |pair| &pair.spans);
        let positions = match self.graph.span_count() {
            1 => Positions::whole(tokens),
            _ => Positions::of(spans, device)?,
        };
        Ok(Batch {
            clean: ids(|pair| &pair.clean)?,
            corrupted: ids(|pair| &pair.corrupted)?,
            weights: Tensor::from_vec(weights, (pairs.len(), vocab_size), device)?,
            positions,
        })
    }

    /// Performs the clean and corrupted runs; `observer` sees only the clean run.
    fn prepared(&self, places: &[usize], observer: &mut dyn Observer) -> Result<Prepared> {
        let batch = self.batch(places)?;
        let mut record = Record::new(places_of_sources(self.model.config().n_layer));
        let pass = &mut Pass::inference().observed_by(&mut record);
        self.model.transformer().forward_with(&batch.corrupted, None, pass)?;
        let corrupted = written(self.model, &record)?;
        let reference = log_softmax(&self.logits(&batch.clean, observer)?)?;
        Ok(Prepared { batch, corrupted, reference })
    }

    /// Returns the logits after the last token, `(B, V)`.
    fn logits(&self, ids: &Tensor, observer: &mut dyn Observer) -> candle_core::Result<Tensor> {
        let pass = &mut Pass::inference().observed_by(observer);
        self.model.forward_with(ids, LogitsFor::LastToken, None, pass)?.squeeze(1)?.to_dtype(DType::F32)
    }

    /// Sums the metric over a batch with these logits.
    fn metric_of(prepared: &Prepared, logits: &Tensor, metric: CircuitMetric) -> candle_core::Result<Tensor> {
        let Prepared { batch, reference, .. } = prepared;
        match metric {
            CircuitMetric::LogitDifference => (logits * &batch.weights)?.sum_all(),
            CircuitMetric::ProbabilityDifference => (log_softmax(logits)?.exp()? * &batch.weights)?.sum_all(),
            CircuitMetric::Divergence => (reference.exp()? * (reference - log_softmax(logits)?)?)?.sum_all(),
        }
    }

    fn sum(&self, prepared: &Prepared, circuit: &Circuit, metric: CircuitMetric) -> Result<f64> {
        let whole = Positions::whole(prepared.batch.clean.dim(1)?);
        let positions = match circuit.graph().span_count() {
            1 => &whole,
            _ => &prepared.batch.positions,
        };
        let mut circuit_run = CircuitRun::new(self.model, circuit, positions, &prepared.corrupted);
        let logits = self.logits(&prepared.batch.clean, &mut circuit_run)?;
        Ok(f64::from(Self::metric_of(prepared, &logits, metric)?.to_scalar::<f32>()?))
    }

    /// Adds edge scores: `differences` times the gradients of a run with these token embeddings.
    fn add_scores_of(
        &self,
        prepared: &Prepared,
        embeddings: Tensor,
        differences: &[(&Span, Tensor)],
        sums: &mut [f64],
    ) -> Result<()> {
        let (model, graph, batch) = (self.model, &self.graph, &prepared.batch);
        let (rows, tokens) = batch.clean.dims2()?;
        let config = model.config();
        // Without spans, the gradients at keys and values cover all queries.
        let is_spanned = graph.span_count() > 1;
        let kinds = match is_spanned {
            true => [SiteKind::Q, SiteKind::AttnScores, SiteKind::Z],
            false => [SiteKind::Q, SiteKind::K, SiteKind::V],
        };
        let mut probes = BTreeMap::new();
        let mut probe = |site: Site, shape: &[usize], dtype: DType| -> Result<()> {
            probes.insert(site, Var::zeros(shape, dtype, model.device())?);
            Ok(())
        };
        let dtype = model.dtype();
        // Scores of half-precision models are computed in f32.
        let score_dtype = sum_dtype(dtype);
        for (layer, block) in model.transformer().blocks().iter().enumerate() {
            let (heads, width) = (block.attn().num_heads(), block.attn().head_dim());
            for kind in kinds {
                let site = Site::in_block(layer, kind);
                match kind {
                    SiteKind::AttnScores => probe(site, &[rows, heads, tokens, tokens], score_dtype)?,
                    _ => probe(site, &[rows, tokens, heads, width], dtype)?,
                }
            }
            let inner = block.mlp().expand().out_features();
            probe(Site::in_block(layer, SiteKind::MlpPre), &[rows, tokens, inner], dtype)?;
        }
        let end = config.n_layer.checked_sub(1).map(|last| Site::in_block(last, SiteKind::ResidPost));
        if let Some(end) = end {
            probe(end, &[rows, tokens, config.n_embd], dtype)?;
        }
        let mut probes = Probes(probes);
        let places: Vec<Site> = probes.0.keys().copied().collect();
        let variables: Vec<Var> = probes.0.values().cloned().collect();
        let variables: Vec<&Tensor> = variables.iter().map(Var::as_tensor).collect();
        let streams = (0..config.n_layer).flat_map(|layer| {
            [SiteKind::ResidPre, SiteKind::ResidMid].map(|kind| Site::in_block(layer, kind))
        });
        let of_heads = (0..config.n_layer)
            .filter(|_| is_spanned)
            .flat_map(|layer| [SiteKind::Q, SiteKind::Pattern].map(|kind| Site::in_block(layer, kind)));
        let mut record = Record::new(streams.chain(of_heads));
        let mut embeddings = Embeddings(embeddings);
        let (_, found) = gradients(&variables, InitialGradients::Nothing, 1.0, || {
            let observers: Vec<&mut dyn Observer> = vec![&mut embeddings, &mut record, &mut probes];
            let logits = self.logits(&batch.clean, &mut Chain(observers))?;
            Self::metric_of(prepared, &logits, self.metric)
        })?;
        let mut found: BTreeMap<Site, Tensor> =
            places.into_iter().zip(found).filter_map(|(site, gradient)| Some((site, gradient?))).collect();
        // A hook point that does not affect the metric has no gradient.
        let mut take = |site: Site| found.remove(&site);
        let within_spans = |row: &Row, inputs: &Tensor, sums: &mut [f64]| -> Result<()> {
            for (span, written) in differences {
                let rows = (std::slice::from_ref(row), EdgeSpans::within(span.span));
                add_scores(sums, graph, rows, &span.of(inputs)?, written)?;
            }
            Ok(())
        };
        for layer in 0..config.n_layer {
            let site = |kind| Site::in_block(layer, kind);
            if let [Some(q), Some(first), Some(second)] = kinds.map(|kind| take(site(kind))) {
                let residual = record.get(site(SiteKind::ResidPre))?;
                let heads = graph.rows_of_queries(layer).len();
                let rows = [graph.rows_of_queries(layer), graph.rows_of_keys_and_values(layer)].concat();
                for (destination, _) in differences {
                    let inputs = if is_spanned {
                        let of_heads = HeadGradients {
                            scores: &first,
                            z: &second,
                            queries: record.get(site(SiteKind::Q))?,
                            pattern: record.get(site(SiteKind::Pattern))?,
                            scale: config.attention_scale(layer),
                        };
                        let [k, v] = of_heads.of_queries_in(destination)?;
                        into_heads(model, layer, residual, [&q, &k, &v])?
                    } else {
                        into_heads(model, layer, residual, [&q, &first, &second])?
                    };
                    for (source, written) in differences {
                        let spans = EdgeSpans { source: source.span, destination: destination.span };
                        let first = if spans.source == spans.destination { 0 } else { heads };
                        let rows = &rows[first..];
                        let inputs = source.of(&inputs.narrow(0, first, rows.len())?)?;
                        add_scores(sums, graph, (rows, spans), &inputs, written)?;
                    }
                }
            }
            if let Some(pre) = take(site(SiteKind::MlpPre)) {
                let inputs = into_mlp(model, layer, record.get(site(SiteKind::ResidMid))?, &pre)?;
                within_spans(&graph.row_of_mlp(layer), &inputs, sums)?;
            }
        }
        if let Some(inputs) = end.and_then(take) {
            within_spans(&graph.row_of_logits(), &inputs.unsqueeze(0)?, sums)?;
        }
        Ok(())
    }
}
