//! Local replacement model of a run, with transcoder features in place of the MLPs.
//!
//! All nonlinearities are frozen: attention patterns, layer norm scales and MLP outputs have their values
//! from the run. A transcoder's skip connection stays live. The effect of one node on another is then exact:
//! `A[t ← s]` is the dot product of two vectors: the contribution of `s` to the MLP outputs, and the gradient
//! of `t` at the MLP outputs. The backward pass is written by hand. With `LNᵀ(g) = (w∘g − mean(w∘g)) / s`,
//! attention maps a gradient `g` to `g + LN1ᵀ(patternᵀ(g · W_O) · W_V)`. On its way down, the gradient meets
//! the MLP output of every layer below its target.
//!
//! The decomposition is complete. A pre-activation, or a logit minus the mean logit, is the sum of the
//! contributions of features, errors, token embeddings, position embeddings and biases. Source:
//! decoderesearch/circuit-tracer, `circuit_tracer/attribution/attribute_transformerlens.py` at 6b76d08.
//! circuit-tracer has no nodes for positions and omits the errors at the first position.

use candle_core::{D, DType, Device, Tensor};
use candle_gpt2::{Gpt2LMHeadModel, Site, SiteKind};

use crate::error::Result;
use crate::frozen::{Biases, FrozenAttention, FrozenNorm, RecordedRun, joined, rows};
use crate::widths::sum_dtype;
use crate::{Add, Edit, InterpretError, Place, Run, TranscoderLayer, Transcoders};

/// Cumulative probability up to which logits become nodes.
const LOGIT_SHARE: f64 = 0.95;
/// Maximum number of logit nodes.
const MAX_LOGITS: usize = 10;
/// Number of targets per batch.
pub(crate) const BATCH: usize = 64;
/// Approximate number of tensors per batch that are live at the same time.
const BATCH_TENSORS: usize = 8;

/// A node of an attribution graph. [`ReplacementModel::nodes`] returns all of them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum GraphNode {
    /// An active transcoder feature.
    Feature {
        /// Layer whose input the feature reads.
        layer: usize,
        /// Token position at which the feature is active.
        position: usize,
        /// Index of the feature in the layer.
        feature: usize,
        /// Activation of the feature.
        activation: f64,
    },
    /// Reconstruction error of the transcoders for an MLP output.
    Error {
        /// Layer of the MLP.
        layer: usize,
        /// Token position.
        position: usize,
    },
    /// A token embedding, without the position embedding.
    Embedding {
        /// Position of the token.
        position: usize,
        /// Token id.
        token: u32,
    },
    /// A position embedding.
    Position {
        /// The position.
        position: usize,
    },
    /// A logit after the last token, minus the mean logit.
    Logit {
        /// The predicted token.
        token: u32,
        /// Probability of the token.
        probability: f64,
    },
}

impl GraphNode {
    /// Whether the node depends on other nodes.
    pub fn is_target(&self) -> bool {
        matches!(self, Self::Feature { .. } | Self::Logit { .. })
    }
}

/// Limits for a graph. An argument of [`ReplacementModel::new`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GraphOptions {
    /// Maximum number of features with incoming edges.
    ///
    /// The features with the most influence on the logits are selected.
    pub max_feature_nodes: usize,
    /// Maximum memory for the graph in bytes, excluding the model and the transcoders.
    pub max_bytes: u64,
    /// Whether to omit features at the first token, so that its MLP outputs are entirely error.
    ///
    /// Transcoders are usually trained without the first token.
    pub skips_first: bool,
}

impl Default for GraphOptions {
    /// Returns limits of 4,096 features and 4 GiB, and includes features at the first token.
    fn default() -> Self {
        Self { max_feature_nodes: 4096, max_bytes: 4 << 30, skips_first: false }
    }
}

/// New activation for a feature. An argument of [`ReplacementModel::edits`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FeatureChange {
    /// Node of the feature.
    pub node: usize,
    /// New activation.
    pub value: f64,
}

/// A feature at a position, active or not. An argument of [`ReplacementModel::unit_effects`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FeatureAtPosition {
    /// Layer whose input the feature reads.
    pub layer: usize,
    /// Token position, counted from 0.
    pub position: usize,
    /// Index of the feature in the layer.
    pub feature: usize,
}

/// Contributions of all nodes to the requested targets, from [`ReplacementModel::edges`].
#[derive(Debug, Clone, PartialEq)]
pub struct Edges {
    /// Contribution of each node to each target, in node order.
    pub rows: Vec<Vec<f64>>,
    /// Bias contribution to each target: attention, norms, decoders and the target's own encoder.
    pub biases: Vec<f64>,
}

/// Contributions of nodes to the MLP output of a layer at one position.
struct NodeContributions {
    nodes: Vec<usize>,
    /// One column for each node, `(C, N)`.
    directions: Tensor,
}

impl NodeContributions {
    /// Adds the contributions to the targets' edges; `g` holds the targets' gradients, `(B, 1, C)`.
    fn read_out(&self, g: &Tensor, targets: &[BackwardStart], edges: &mut Edges) -> candle_core::Result<()> {
        let added = g.squeeze(1)?.contiguous()?.matmul(&self.directions)?; // (B, N)
        for (start, added) in targets.iter().zip(doubles(&added)?.to_vec2::<f64>()?) {
            for (node, added) in self.nodes.iter().zip(added) {
                edges.rows[start.row][*node] += added;
            }
        }
        Ok(())
    }
}

/// One layer of the local replacement model.
struct FrozenLayer {
    attention: FrozenAttention,
    /// Norm between the residual stream and the encoder, if there is one.
    encoder_norm: Option<FrozenNorm>,
    transcoder: TranscoderLayer,
    /// One entry for each position.
    contributions: Vec<NodeContributions>,
}

impl FrozenLayer {
    /// Maps the gradient `(B, T, C)` at the encoder's input to the gradient at the residual stream.
    fn read_back(&self, g: &Tensor, biases: &mut Biases) -> candle_core::Result<Tensor> {
        match &self.encoder_norm {
            None => Ok(g.clone()),
            Some(norm) => {
                biases.add(g, norm.bias.as_ref())?;
                norm.back(g)
            }
        }
    }
}

/// Local replacement model of a run.
///
/// ```
/// use candle_gpt2_interpret::{GraphOptions, ReplacementModel, Run, Transcoders};
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
/// # let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// # let random = |one: candle_gpt2::Parameter| Ok((one.name, Tensor::randn(0f32, 1., one.shape, &Device::Cpu)?));
/// # let tensors = candle_gpt2::expected_parameters(&sizes).into_iter().map(random).collect::<candle_core::Result<_>>()?;
/// # let model = Gpt2LMHeadModel::load(&sizes, candle_gpt2::ByOutput(candle_nn::VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu)))?;
///
/// let run = Run::new(&model, &[1, 2, 3, 4])?;
/// let transcoders = Transcoders::of_neurons(&model, 5)?; // the neurons of the MLPs as features
/// let replacement = ReplacementModel::new(&run, &transcoders, &GraphOptions::default())?;
/// let last = replacement.nodes().len() - 1; // a logit
/// let edges = replacement.edges(&[last])?;
/// let sum = edges.rows[0].iter().sum::<f64>() + edges.biases[0];
/// assert!((sum - replacement.value(last)).abs() < 1e-3, "the contributions of nodes and biases add up to the value");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct ReplacementModel {
    layers: Vec<FrozenLayer>,
    final_norm: FrozenNorm,
    /// Rows of the output head for the logit nodes, minus the mean row, `(N, C)`.
    head: Tensor,
    /// Embeddings at each position, `(T, C)`.
    tokens: Tensor,
    positions: Tensor,
    nodes: Vec<GraphNode>,
    /// Pre-activations and logits of the target nodes, in node order.
    values: Vec<f64>,
    /// Number of feature nodes, which precede the error nodes.
    features: usize,
    options: GraphOptions,
}

impl ReplacementModel {
    /// Builds the replacement model of a run with these transcoders.
    ///
    /// # Errors
    /// If the transcoders belong to another model, if no feature is active, if the graph would exceed its
    /// memory limit, or if the model fails.
    pub fn new(run: &Run, transcoders: &Transcoders, options: &GraphOptions) -> Result<Self> {
        let model = run.model;
        let fits = transcoders.check_model(model.config());
        fits.map_err(|error| InterpretError::Mismatch(error.to_string()))?;
        // In half precision, contributions would not add up to the targets' values.
        let dtype = sum_dtype(model.dtype());
        let transcoders = transcoders.cast(dtype, model.device())?;
        let (n_layer, tokens) = (model.config().n_layer, run.ids.len());
        let recorded = RecordedRun::of(run, dtype)?;
        if options.skips_first && tokens == 1 {
            let what = "the text has only the BOS token, which the graph omits; use a longer text".to_owned();
            return Err(InterpretError::Mismatch(what));
        }
        let width = model.config().n_embd;
        let mut sizes = GraphSize { features: 0, written: 0, layers: n_layer, tokens, width };
        let read = read_layers(&recorded, model, &transcoders, options.skips_first, |layer, count| {
            sizes.features += count;
            sizes.written += count * transcoders.layers()[layer].decoders.len();
            sizes.check(options, dtype)
        })?;
        let features = sizes.features;
        if features == 0 {
            return Err(InterpretError::NothingActive);
        }

        let (mut nodes, mut values) = (Vec::new(), Vec::new());
        for (layer, read) in read.iter().enumerate() {
            for Active { position, feature, before, activation } in read.active.iter().copied() {
                nodes.push(GraphNode::Feature { layer, position, feature, activation });
                values.push(before);
            }
        }
        let errors = (0..n_layer).flat_map(|layer| (0..tokens).map(move |position| (layer, position)));
        nodes.extend(errors.map(|(layer, position)| GraphNode::Error { layer, position }));
        let embedded = run.ids.iter().enumerate();
        nodes.extend(embedded.map(|(position, token)| GraphNode::Embedding { position, token: *token }));
        nodes.extend((0..tokens).map(|position| GraphNode::Position { position }));

        let mut layers = Vec::new();
        for (layer, block) in model.transformer().blocks().iter().enumerate() {
            let output = recorded.rows(layer, SiteKind::MlpOut)?;
            let contributions =
                contributions(layer, &output, &read, &transcoders, features + layer * tokens)?;
            layers.push((FrozenAttention::of(&recorded, layer, block)?, contributions));
        }
        let layers = layers.into_iter().zip(read).zip(transcoders.layers());
        let layers = layers.map(|(((attention, contributions), read), transcoder)| FrozenLayer {
            attention,
            encoder_norm: read.norm,
            transcoder: transcoder.clone(),
            contributions,
        });
        let layers = layers.collect();

        let (logits, head) = logits(model, &recorded)?;
        if logits.iter().any(|(_, value)| !value.is_finite()) {
            return Err(InterpretError::Mismatch(
                "the model's logits are not all finite; check its weights".into(),
            ));
        }
        for (node, value) in logits {
            nodes.push(node);
            values.push(value);
        }
        Ok(Self {
            layers,
            final_norm: FrozenNorm::of(
                &recorded,
                model.transformer().ln_f(),
                Site::outside(SiteKind::LnFinalScale),
            )?,
            head,
            tokens: recorded.outside(SiteKind::Embed)?,
            positions: recorded.outside(SiteKind::PosEmbed)?,
            nodes,
            values,
            features,
            options: *options,
        })
    }

    /// Returns all nodes in order.
    ///
    /// The order is features by layer, position and index, then errors by layer and position, token
    /// embeddings, position embeddings, and logits with the most probable first.
    pub fn nodes(&self) -> &[GraphNode] {
        &self.nodes
    }

    /// Number of feature nodes; they precede all other nodes.
    pub fn features(&self) -> usize {
        self.features
    }

    /// Returns the range of the logit nodes.
    pub fn logits(&self) -> std::ops::Range<usize> {
        let count = self.values.len() - self.features;
        self.nodes.len() - count..self.nodes.len()
    }

    /// Returns the options that the model was built with.
    pub(crate) fn options(&self) -> &GraphOptions {
        &self.options
    }

    /// Returns a feature's pre-activation, or a logit minus the mean logit; 0 for source nodes.
    pub fn value(&self, node: usize) -> f64 {
        let first_logit = self.logits().start;
        match node {
            node if node < self.features => self.values[node],
            node if node >= first_logit => {
                self.values.get(self.features + node - first_logit).copied().unwrap_or(0.0)
            }
            _ => 0.0,
        }
    }

    /// Computes the contribution of every node to the given targets (features or logits).
    ///
    /// # Errors
    /// If a node is not a target, or if allocation on the device fails.
    pub fn edges(&self, targets: &[usize]) -> Result<Edges> {
        let mut edges = Edges { rows: Vec::new(), biases: Vec::new() };
        for batch in targets.chunks(BATCH) {
            let found = self.batch(batch)?;
            edges.rows.extend(found.rows);
            edges.biases.extend(found.biases);
        }
        Ok(edges)
    }

    /// Returns the starting points of the targets' backward passes, latest layer first.
    fn starts(&self, targets: &[usize]) -> Result<Vec<BackwardStart>> {
        let mut starts = Vec::new();
        for (row, node) in targets.iter().enumerate() {
            starts.push(match self.nodes.get(*node) {
                Some(GraphNode::Feature { layer, position, feature, .. }) => {
                    BackwardStart { row, layer: *layer, position: *position, reads: *feature }
                }
                Some(GraphNode::Logit { .. }) => BackwardStart {
                    row,
                    layer: self.layers.len(),
                    position: self.tokens.dim(0)? - 1,
                    reads: node - self.logits().start,
                },
                _ => {
                    return Err(InterpretError::Mismatch(format!(
                        "node {node} is neither a feature nor a logit"
                    )));
                }
            });
        }
        starts.sort_by_key(|start| std::cmp::Reverse(start.layer));
        Ok(starts)
    }

    /// Computes [`Self::edges`] for a single batch of targets.
    fn batch(&self, targets: &[usize]) -> Result<Edges> {
        let mut edges = Edges {
            rows: vec![vec![0.0; self.nodes.len()]; targets.len()],
            biases: vec![0.0; targets.len()],
        };
        let starts = self.starts(targets)?;
        let (g, biases) = self.walk(&starts, |layer, here, begun| {
            let contributions = self.layers[layer].contributions.iter().enumerate();
            for (position, contribution) in contributions.take(here.dim(1)?) {
                contribution.read_out(&here.narrow(1, position, 1)?, begun, &mut edges)?;
            }
            Ok(())
        })?;
        let Some(g) = g else { return Ok(edges) };
        let tokens = g.dim(1)?;
        let first = self.features + self.layers.len() * self.tokens.dim(0)?;
        for (embeddings, first) in [(&self.tokens, first), (&self.positions, first + self.tokens.dim(0)?)] {
            let added = g.broadcast_mul(&embeddings.narrow(0, 0, tokens)?)?.sum(D::Minus1)?; // (B, T)
            for (start, added) in starts.iter().zip(doubles(&added)?.to_vec2::<f64>()?) {
                edges.rows[start.row][first..first + tokens].copy_from_slice(&added);
            }
        }
        if let Biases(Some(biases)) = biases {
            for (start, bias) in starts.iter().zip(doubles(&biases)?.to_vec1::<f64>()?) {
                edges.biases[start.row] = bias;
            }
        }
        Ok(edges)
    }

    /// Computes the effect of one unit of a feature, active or not, on the given features and logits.
    ///
    /// # Errors
    /// If [`Self::edges`] fails, or if the feature is out of range.
    pub fn unit_effects(&self, feature: FeatureAtPosition, targets: &[usize]) -> Result<Vec<f64>> {
        let decoders = &self.layer(feature)?.transcoder.decoders;
        let mut effects = vec![0.0; targets.len()];
        for (batch, effects) in targets.chunks(BATCH).zip(effects.chunks_mut(BATCH)) {
            self.walk(&self.starts(batch)?, |layer, here, begun| {
                let decoder = layer.checked_sub(feature.layer).and_then(|step| decoders.get(step));
                let Some(decoder) = decoder.filter(|_| feature.position < here.dims()[1]) else {
                    return Ok(());
                };
                let direction = decoder.get(feature.feature)?.unsqueeze(1)?; // (C, 1)
                let g = here.narrow(1, feature.position, 1)?.squeeze(1)?.contiguous()?;
                let added = doubles(&g.matmul(&direction)?)?.flatten_all()?.to_vec1::<f64>()?;
                for (start, added) in begun.iter().zip(added) {
                    effects[start.row] += added;
                }
                Ok(())
            })?;
        }
        Ok(effects)
    }

    /// Returns the layer whose input a feature reads, after checking the indices.
    fn layer(
        &self,
        FeatureAtPosition { layer, position, feature }: FeatureAtPosition,
    ) -> Result<&FrozenLayer> {
        let frozen = self
            .layers
            .get(layer)
            .filter(|frozen| feature < frozen.transcoder.latents() && position < frozen.contributions.len());
        frozen.ok_or_else(|| {
            InterpretError::Mismatch(format!("layer {layer} has no feature {feature} at position {position}"))
        })
    }

    /// Runs the backward pass from the given targets to the embeddings.
    ///
    /// Returns the gradient `(B, T, C)` and the bias contributions along the way. For each layer, `read`
    /// receives the gradient at the MLP output and the targets of its rows.
    fn walk(
        &self,
        starts: &[BackwardStart],
        mut read: impl FnMut(usize, &Tensor, &[BackwardStart]) -> candle_core::Result<()>,
    ) -> Result<(Option<Tensor>, Biases)> {
        // No gradient reaches tokens after the last target.
        let tokens = starts.iter().map(|start| start.position + 1).max().unwrap_or(1);
        let (mut begun, mut biases) = (0, Biases(None));
        let mut g = None;
        let of_layer = |layer: usize| starts.iter().filter(move |start| start.layer == layer);
        let of_logits: Vec<&BackwardStart> = of_layer(self.layers.len()).collect();
        if !of_logits.is_empty() {
            let read = self.head.index_select(&indices(&of_logits, self.head.device())?, 0)?;
            let start = scattered(&read, &of_logits, tokens)?;
            biases.add(&start, self.final_norm.bias.as_ref())?;
            g = Some(self.final_norm.back(&start)?);
            begun = of_logits.len();
        }
        for (layer, frozen) in self.layers.iter().enumerate().rev() {
            if let Some(here) = &mut g {
                read(layer, here, &starts[..begun])?;
                biases.add(here, Some(&frozen.transcoder.decoder_bias))?;
                if let Some(skip) = &frozen.transcoder.skip {
                    let read = rows(here)?.matmul(&skip.t()?)?.reshape(here.dims())?;
                    *here = (&*here + frozen.read_back(&read, &mut biases)?)?;
                }
            }
            let of_features: Vec<&BackwardStart> = of_layer(layer).collect();
            if !of_features.is_empty() {
                let encoder = &frozen.transcoder.encoder;
                let reads = indices(&of_features, self.head.device())?;
                let mut own = Biases(Some(encoder.bias().index_select(&reads, 0)?));
                let read = encoder.weight().index_select(&reads, 1)?.t()?; // (B, C)
                let start = frozen.read_back(&scattered(&read, &of_features, tokens)?, &mut own)?;
                biases.join(own)?;
                g = joined(g, Some(start))?;
                begun += of_features.len();
            }
            if let Some(here) = &mut g {
                *here = frozen.attention.back(here, &mut biases)?;
            }
        }
        Ok((g, biases))
    }

    /// Returns edits that set features to other values by adding the change to the MLP outputs.
    ///
    /// # Errors
    /// If a node is not a feature, or if allocation on the device fails.
    pub fn edits(&self, changes: &[FeatureChange]) -> Result<Vec<Edit>> {
        let mut edits = Vec::new();
        for FeatureChange { node, value } in changes {
            let Some(GraphNode::Feature { layer, position, feature, activation }) = self.nodes.get(*node)
            else {
                return Err(InterpretError::Mismatch(format!("node {node} is not a feature")));
            };
            let feature = FeatureAtPosition { layer: *layer, position: *position, feature: *feature };
            edits.extend(self.addition(feature, value - activation)?);
        }
        Ok(edits)
    }

    /// Returns edits that add `added` units of a feature, active or not, to the MLP outputs.
    ///
    /// # Errors
    /// If the feature is out of range, or if allocation on the device fails.
    pub fn addition(&self, feature: FeatureAtPosition, added: f64) -> Result<Vec<Edit>> {
        let mut edits = Vec::new();
        for (step, decoder) in self.layer(feature)?.transcoder.decoders.iter().enumerate() {
            let added = (decoder.get(feature.feature)? * added)?;
            let site = Site::in_block(feature.layer + step, SiteKind::MlpOut);
            edits.push(Add::new(site, added).at(Place::position(feature.position)));
        }
        Ok(edits)
    }
}

/// Starting point of a target's backward pass.
struct BackwardStart {
    /// Row of the target in the batch.
    row: usize,
    /// Layer whose input the feature reads; the number of layers for a logit.
    layer: usize,
    position: usize,
    /// Index of the feature in the layer, or of the logit among the logit nodes.
    reads: usize,
}

/// Sizes that determine a graph's memory use.
struct GraphSize {
    features: usize,
    /// Number of directions that features write, one for each layer they write to.
    written: usize,
    layers: usize,
    tokens: usize,
    width: usize,
}

impl GraphSize {
    /// Memory for the rows, the directions and one batch, in bytes.
    fn bytes(&self, options: &GraphOptions, dtype: DType) -> u64 {
        let sizes = [self.features, self.written, self.layers, self.tokens, self.width];
        let [features, written, layers, tokens, width] = sizes.map(|size| size as u64);
        let columns = features + (layers + 2) * tokens;
        let rows = features.min(options.max_feature_nodes as u64) + MAX_LOGITS as u64;
        let batch = BATCH as u64
            * (columns * 8 + BATCH_TENSORS as u64 * tokens * width * dtype.size_in_bytes() as u64);
        // The rows exist twice while features without a node are removed.
        2 * rows * columns * 4 + (written + layers * tokens) * width * dtype.size_in_bytes() as u64 + batch
    }

    fn check(&self, options: &GraphOptions, dtype: DType) -> Result<()> {
        let needed = self.bytes(options, dtype);
        if needed > options.max_bytes {
            let (features, limit) = (self.features, options.max_bytes);
            return Err(InterpretError::GraphMemory {
                features,
                needed: mebibytes(needed),
                limit: mebibytes(limit),
            });
        }
        Ok(())
    }
}

fn mebibytes(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}

/// Encoder input of a layer and the features that are active there.
struct ReadLayer {
    /// Norm between the residual stream and the encoder.
    norm: Option<FrozenNorm>,
    /// Encoder input, `(T, C)`.
    x: Tensor,
    active: Vec<Active>,
    /// Node index of the first active feature.
    first_node: usize,
}

impl Transcoders {
    /// Computes the latents of each layer in a run, `(T, F)`.
    ///
    /// ```
    /// use candle_gpt2_interpret::{Run, Transcoders};
    /// # use candle_core::{DType, Device};
    /// # use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
    /// # let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
    /// # let model = Gpt2LMHeadModel::load(&sizes, candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu))?;
    ///
    /// let neurons = Transcoders::of_neurons(&model, 5)?;
    /// let latents = neurons.latents(&Run::new(&model, &[1, 2, 3])?)?;
    /// assert_eq!(latents[1].dims(), [3, 24]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the transcoders belong to another model or are on a different device, or if the model fails.
    pub fn latents(&self, run: &Run) -> Result<Vec<Tensor>> {
        let recorded = RecordedRun::of(run, DType::F32)?;
        let blocks = run.model.transformer().blocks().iter().zip(self.layers()).enumerate();
        let latents = blocks.map(|(layer, (block, transcoder))| {
            let norm = FrozenNorm::before_encoder(&recorded, layer, block, self.input())?;
            let x = recorded.read(layer, norm.as_ref())?;
            Ok(transcoder.encoder.activate(&transcoder.encoder.pre_activations(&x)?)?)
        });
        latents.collect()
    }
}

fn read_layers(
    recorded: &RecordedRun,
    model: &Gpt2LMHeadModel,
    transcoders: &Transcoders,
    skips_first: bool,
    mut check: impl FnMut(usize, usize) -> Result<()>,
) -> Result<Vec<ReadLayer>> {
    let mut read = Vec::new();
    let mut first_node = 0;
    for (layer, block) in model.transformer().blocks().iter().enumerate() {
        let encoder = &transcoders.layers()[layer].encoder;
        let norm = FrozenNorm::before_encoder(recorded, layer, block, transcoders.input())?;
        let x = recorded.read(layer, norm.as_ref())?;
        let before = encoder.pre_activations(&x)?;
        let latents = encoder.activate(&before)?;
        let mut active = Vec::new();
        // Check the limit after each position, since a layer may have more active features than fit into
        // memory.
        for position in usize::from(skips_first)..x.dim(0)? {
            let [before, latents] =
                [&before, &latents].map(|rows| doubles(&rows.get(position)?)?.to_vec1::<f64>());
            let (before, latents) = (before?, latents?);
            if before.iter().chain(&latents).any(|value| !value.is_finite()) {
                let what = format!(
                    "layer {layer}: a pre-activation at position {position} is not a finite number; check the transcoder's weights"
                );
                return Err(InterpretError::Mismatch(what));
            }
            let here =
                latents.into_iter().zip(before).enumerate().filter(|(_, (activation, _))| *activation != 0.0);
            let first = active.len();
            active.extend(here.map(|(feature, (activation, before))| Active {
                position,
                feature,
                before,
                activation,
            }));
            check(layer, active.len() - first)?;
        }
        let count = active.len();
        read.push(ReadLayer { norm, x, active, first_node });
        first_node += count;
    }
    Ok(read)
}

/// Contributions of nodes to a layer's MLP output, `output` `(T, C)`, at each position.
///
/// The nodes are features of this layer, features of earlier layers that write here, and the error, which is
/// the remainder.
fn contributions(
    layer: usize,
    output: &Tensor,
    read: &[ReadLayer],
    transcoders: &Transcoders,
    first_error: usize,
) -> candle_core::Result<Vec<NodeContributions>> {
    let rest = (output - constant(&transcoders.layers()[layer], &read[layer].x)?)?;
    let mut parts = vec![(Vec::new(), Vec::new()); output.dim(0)?];
    for (source, read) in read.iter().enumerate().take(layer + 1) {
        let Some(decoder) = transcoders.layers()[source].decoders.get(layer - source) else { continue };
        if read.active.is_empty() {
            continue;
        }
        let written = written(decoder, &read.active)?; // (N, C)
        let mut first = 0;
        for here in read.active.chunk_by(|a, b| a.position == b.position) {
            let (nodes, directions): &mut (Vec<usize>, Vec<Tensor>) = &mut parts[here[0].position];
            nodes.extend((first..first + here.len()).map(|index| read.first_node + index));
            directions.push(written.narrow(0, first, here.len())?);
            first += here.len();
        }
    }
    let contribution = |(position, (mut nodes, mut directions)): (usize, (Vec<usize>, Vec<Tensor>))| {
        let mut error = rest.narrow(0, position, 1)?;
        for written in &directions {
            error = (error - written.sum_keepdim(0)?)?;
        }
        nodes.push(first_error + position);
        directions.push(error);
        Ok(NodeContributions { nodes, directions: Tensor::cat(&directions, 0)?.t()?.contiguous()? })
    };
    parts.into_iter().enumerate().map(contribution).collect()
}

/// Part of a reconstruction that does not come from features, `(T, C)`.
fn constant(transcoder: &TranscoderLayer, x: &Tensor) -> candle_core::Result<Tensor> {
    let bias = transcoder.decoder_bias.broadcast_as(x.shape())?;
    match &transcoder.skip {
        Some(skip) => x.matmul(skip)? + bias,
        None => Ok(bias),
    }
}

/// A feature that is active at a position.
#[derive(Clone, Copy)]
struct Active {
    position: usize,
    feature: usize,
    before: f64,
    activation: f64,
}

/// Contributions of active features through a decoder `(F, C)`: `(N, C)`.
fn written(decoder: &Tensor, active: &[Active]) -> candle_core::Result<Tensor> {
    let device = decoder.device();
    let activations: Vec<f64> = active.iter().map(|one| one.activation).collect();
    let activations = Tensor::from_vec(activations, (active.len(), 1), &Device::Cpu)?;
    let features: Vec<i64> = active.iter().map(|one| one.feature as i64).collect();
    let features = Tensor::from_vec(features, active.len(), device)?;
    let activations = activations.to_dtype(decoder.dtype())?.to_device(device)?;
    decoder.index_select(&features, 0)?.broadcast_mul(&activations)
}

/// Returns the logit nodes with their values and output head rows.
///
/// The rows, `(N, C)`, have the mean row subtracted.
fn logits(
    model: &Gpt2LMHeadModel,
    recorded: &RecordedRun,
) -> candle_core::Result<(Vec<(GraphNode, f64)>, Tensor)> {
    let weight = recorded.cast(&model.lm_head().weight().to_tensor()?)?; // (V, C)
    let hidden = recorded.outside(SiteKind::FinalNorm)?;
    let last = hidden.narrow(0, hidden.dim(0)? - 1, 1)?; // (1, C)
    let logits = doubles(&last.matmul(&weight.t()?)?)?.squeeze(0)?.to_vec1::<f64>()?;
    let mean = logits.iter().sum::<f64>() / logits.len() as f64;
    let max_logit = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let total: f64 = logits.iter().map(|logit| libm::exp(logit - max_logit)).sum();
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
    let (mut nodes, mut share) = (Vec::new(), 0.0);
    for id in order.into_iter().take(MAX_LOGITS) {
        if share >= LOGIT_SHARE {
            break;
        }
        let probability = libm::exp(logits[id] - max_logit) / total;
        share += probability;
        let token = u32::try_from(id).map_err(candle_core::Error::wrap)?;
        nodes.push((GraphNode::Logit { token, probability }, logits[id] - mean));
    }
    let tokens = nodes.iter().filter_map(|(node, _)| match node {
        GraphNode::Logit { token, .. } => Some(*token),
        _ => None,
    });
    let tokens = Tensor::from_vec(tokens.collect::<Vec<u32>>(), nodes.len(), weight.device())?;
    let head = weight.index_select(&tokens, 0)?.broadcast_sub(&weight.mean_keepdim(0)?)?;
    Ok((nodes, head))
}

/// Index of the feature or logit for each start.
fn indices(starts: &[&BackwardStart], device: &Device) -> candle_core::Result<Tensor> {
    let reads: Vec<i64> = starts.iter().map(|start| start.reads as i64).collect();
    Tensor::from_vec(reads, starts.len(), device)
}

/// Places each row of `(B, C)` at the position of its start, with zeros elsewhere: `(B, T, C)`.
fn scattered(read: &Tensor, starts: &[&BackwardStart], tokens: usize) -> candle_core::Result<Tensor> {
    let device = read.device();
    let mut places = vec![0f32; starts.len() * tokens];
    starts.iter().enumerate().for_each(|(row, start)| places[row * tokens + start.position] = 1.0);
    let places = Tensor::from_vec(places, (starts.len(), tokens, 1), device)?.to_dtype(read.dtype())?;
    places.broadcast_mul(&read.unsqueeze(1)?)
}

fn doubles(x: &Tensor) -> candle_core::Result<Tensor> {
    x.to_device(&Device::Cpu)?.to_dtype(DType::F64)
}
