//! The local replacement model: a run of a model in which features of transcoders replace the MLPs, and all that is not linear is
//! frozen as the run has it.
//!
//! Frozen are the attention patterns, the scales of the layer norms and the outputs of the MLPs; the skip connection of a transcoder
//! stays live. What a node adds to another one is then exact: `A[t ← s]` is what `s` writes to MLP outputs, multiplied with the
//! gradient of `t` there. The way back is written out by hand. With `LNᵀ(g) = (w∘g − mean(w∘g)) / s`, a gradient `g` passes attention
//! as `g + LN1ᵀ(patternᵀ(g · W_O) · W_V)`, and on its way down it meets the MLP output of every layer below its target.
//!
//! Sums close: a pre-activation, or a logit less the mean of all, is what features, errors, token embeddings, position embeddings and
//! biases add to it. Source: decoderesearch/circuit-tracer, `circuit_tracer/attribution/attribute_transformerlens.py` at 6b76d08,
//! which has no node for positions and leaves the errors of the first position out.

use candle_core::{D, DType, Device, Tensor};
use candle_gpt2::{Gpt2LMHeadModel, Site, SiteKind};

use crate::error::Result;
use crate::frozen::{Biases, FrozenAttention, FrozenNorm, Seen, joined, rows};
use crate::{Add, Edit, InterpretError, Place, Run, TranscoderLayer, Transcoders};

/// Logits are nodes until they have this share of the probability.
const LOGIT_SHARE: f64 = 0.95;
/// More of them are none.
const MAX_LOGITS: usize = 10;
/// Rows that are computed at once.
pub(crate) const BATCH: usize = 64;
/// Tensors of a batch that are there at the same time, about.
const BATCH_TENSORS: usize = 8;

/// A node of an attribution graph. [`ReplacementModel::nodes`] lists them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum GraphNode {
    /// An active feature of a transcoder.
    Feature {
        /// The layer that it reads.
        layer: usize,
        /// The token at which it is active.
        position: usize,
        /// Its number in the layer.
        feature: usize,
        /// How active it is.
        activation: f64,
    },
    /// What the transcoders miss of an MLP's output.
    Error {
        /// The layer.
        layer: usize,
        /// The token.
        position: usize,
    },
    /// The embedding of a token, without its position.
    Embedding {
        /// Its place in the text.
        position: usize,
        /// Its id.
        token: u32,
    },
    /// The embedding of a position.
    Position {
        /// The position.
        position: usize,
    },
    /// A logit after the last token, less the mean of all.
    Logit {
        /// The token that is predicted.
        token: u32,
        /// Its probability.
        probability: f64,
    },
}

impl GraphNode {
    /// Whether it depends on other nodes.
    pub fn is_target(&self) -> bool {
        matches!(self, Self::Feature { .. } | Self::Logit { .. })
    }
}

/// The limits of a graph. [`ReplacementModel::new`] takes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GraphOptions {
    /// Features with edges into them: those with the most influence on the logits.
    pub max_feature_nodes: usize,
    /// Bytes that the graph may take besides the model and the transcoders.
    pub max_bytes: u64,
    /// Whether the first token has no features: its MLP outputs are all error. Transcoders are trained without it, as a rule.
    pub skips_first: bool,
}

impl Default for GraphOptions {
    /// 4,096 features, 4 GiB, and features at the first token.
    fn default() -> Self {
        Self { max_feature_nodes: 4096, max_bytes: 4 << 30, skips_first: false }
    }
}

/// A feature that is set to another value. [`ReplacementModel::edits`] takes it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FeatureChange {
    /// The node of the feature.
    pub node: usize,
    /// Its new activation.
    pub value: f64,
}

/// A feature of a layer at a position, active or not. [`ReplacementModel::unit_effects`] takes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlacedFeature {
    /// The layer that it reads.
    pub layer: usize,
    /// The token, counted from 0.
    pub position: usize,
    /// Its number in the layer.
    pub feature: usize,
}

/// What other nodes add to some targets. [`ReplacementModel::edges`] gives it.
#[derive(Debug, Clone, PartialEq)]
pub struct Edges {
    /// For each target what each node adds, in the order of the nodes.
    pub rows: Vec<Vec<f64>>,
    /// For each target what biases add: of attention, of norms, of decoders, of its own encoder.
    pub biases: Vec<f64>,
}

/// What nodes write to the MLP output of a layer at one position.
struct Writing {
    nodes: Vec<usize>,
    /// `(C, N)`, a column each.
    directions: Tensor,
}

impl Writing {
    /// Adds it to the edges of targets, by their gradients there, `(B, 1, C)`.
    fn read_out(&self, g: &Tensor, targets: &[Start], edges: &mut Edges) -> candle_core::Result<()> {
        let added = g.squeeze(1)?.contiguous()?.matmul(&self.directions)?; // (B, N)
        for (start, added) in targets.iter().zip(doubles(&added)?.to_vec2::<f64>()?) {
            for (node, added) in self.nodes.iter().zip(added) {
                edges.rows[start.row][*node] += added;
            }
        }
        Ok(())
    }
}

/// A layer of the local replacement model.
struct FrozenLayer {
    attention: FrozenAttention,
    /// The norm in front of the encoder, if it reads behind it.
    reading: Option<FrozenNorm>,
    transcoder: TranscoderLayer,
    /// Of each position.
    writings: Vec<Writing>,
}

impl FrozenLayer {
    /// The gradient at the residual stream of that at what the encoder reads, `(B, T, C)`.
    fn read_back(&self, g: &Tensor, biases: &mut Biases) -> candle_core::Result<Tensor> {
        match &self.reading {
            None => Ok(g.clone()),
            Some(norm) => {
                biases.add(g, norm.bias.as_ref())?;
                norm.back(g)
            }
        }
    }
}

/// The local replacement model of a run.
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
/// assert!((sum - replacement.value(last)).abs() < 1e-3, "what the nodes and the biases add is all");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct ReplacementModel {
    layers: Vec<FrozenLayer>,
    final_norm: FrozenNorm,
    /// What the output head reads the logits of the nodes by, `(N, C)`.
    head: Tensor,
    /// What the embeddings add at each position, `(T, C)`.
    tokens: Tensor,
    positions: Tensor,
    nodes: Vec<GraphNode>,
    /// Pre-activations and logits of the nodes that are targets, in the order of the nodes.
    values: Vec<f64>,
    /// Nodes before the errors: the features.
    features: usize,
    options: GraphOptions,
}

impl ReplacementModel {
    /// That of a run, with features of these transcoders.
    ///
    /// # Errors
    /// When the transcoders are of another model, no feature is active, the graph would take more memory than it may, and those of the
    /// model.
    pub fn new(run: &Run, transcoders: &Transcoders, options: &GraphOptions) -> Result<Self> {
        let model = run.model;
        let fits = transcoders.check_model(model.config());
        fits.map_err(|error| InterpretError::Mismatch(error.to_string()))?;
        // Of a model in doubles everything is in doubles; half precision would close no sum.
        let dtype = if model.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let transcoders = transcoders.cast(dtype, model.device())?;
        let (n_layer, tokens) = (model.config().n_layer, run.ids.len());
        let seen = Seen::of(run, dtype)?;
        if options.skips_first && tokens == 1 {
            let what = "the BOS token is left out, and there is no other: give a text".to_owned();
            return Err(InterpretError::Mismatch(what));
        }
        let width = model.config().n_embd;
        let mut sizes = Sizes { features: 0, written: 0, layers: n_layer, tokens, width };
        let read = read_layers(&seen, model, &transcoders, options.skips_first, |layer, count| {
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
            let output = seen.rows(layer, SiteKind::MlpOut)?;
            let writings = writings(layer, &output, &read, &transcoders, features + layer * tokens)?;
            layers.push((FrozenAttention::of(&seen, layer, block)?, writings));
        }
        let layers = layers.into_iter().zip(read).zip(transcoders.layers());
        let layers = layers.map(|(((attention, writings), read), transcoder)| FrozenLayer {
            attention,
            reading: read.norm,
            transcoder: transcoder.clone(),
            writings,
        });
        let layers = layers.collect();

        let (logits, head) = logits(model, &seen)?;
        if logits.iter().any(|(_, value)| !value.is_finite()) {
            return Err(InterpretError::Mismatch("the model's logits are not all numbers".into()));
        }
        for (node, value) in logits {
            nodes.push(node);
            values.push(value);
        }
        Ok(Self {
            layers,
            final_norm: FrozenNorm::of(
                &seen,
                model.transformer().ln_f(),
                Site::outside(SiteKind::LnFinalScale),
            )?,
            head,
            tokens: seen.outside(SiteKind::Embed)?,
            positions: seen.outside(SiteKind::PosEmbed)?,
            nodes,
            values,
            features,
            options: *options,
        })
    }

    /// All nodes: features by layer, position and number; errors by layer and position; token embeddings; position embeddings; logits,
    /// the most probable first.
    pub fn nodes(&self) -> &[GraphNode] {
        &self.nodes
    }

    /// Number of features among the nodes; they are the first.
    pub fn features(&self) -> usize {
        self.features
    }

    /// The nodes of the logits.
    pub fn logits(&self) -> std::ops::Range<usize> {
        let count = self.values.len() - self.features;
        self.nodes.len() - count..self.nodes.len()
    }

    /// What it was made with.
    pub(crate) fn options(&self) -> &GraphOptions {
        &self.options
    }

    /// The pre-activation of a feature, or a logit less the mean of all; 0 of nodes that depend on nothing.
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

    /// What every node adds to these targets, which are features and logits.
    ///
    /// # Errors
    /// When a node is no target, or the device has no memory left.
    pub fn edges(&self, targets: &[usize]) -> Result<Edges> {
        let mut edges = Edges { rows: Vec::new(), biases: Vec::new() };
        for batch in targets.chunks(BATCH) {
            let found = self.batch(batch)?;
            edges.rows.extend(found.rows);
            edges.biases.extend(found.biases);
        }
        Ok(edges)
    }

    /// Where the ways back of some targets begin, those first whose way is the longest.
    fn starts(&self, targets: &[usize]) -> Result<Vec<Start>> {
        let mut starts = Vec::new();
        for (row, node) in targets.iter().enumerate() {
            starts.push(match self.nodes.get(*node) {
                Some(GraphNode::Feature { layer, position, feature, .. }) => {
                    Start { row, layer: *layer, position: *position, reads: *feature }
                }
                Some(GraphNode::Logit { .. }) => Start {
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

    /// [`Self::edges`] of a few targets, all at once.
    fn batch(&self, targets: &[usize]) -> Result<Edges> {
        let mut edges = Edges {
            rows: vec![vec![0.0; self.nodes.len()]; targets.len()],
            biases: vec![0.0; targets.len()],
        };
        let starts = self.starts(targets)?;
        let (g, biases) = self.walk(&starts, |layer, here, begun| {
            let writings = self.layers[layer].writings.iter().enumerate();
            for (position, writing) in writings.take(here.dim(1)?) {
                writing.read_out(&here.narrow(1, position, 1)?, begun, &mut edges)?;
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

    /// Effect of one unit of a feature, active or not, on these targets, which are features and logits.
    ///
    /// # Errors
    /// Those of [`Self::edges`], and if there is no such feature.
    pub fn unit_effects(&self, feature: PlacedFeature, targets: &[usize]) -> Result<Vec<f64>> {
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

    /// The layer that a feature reads, if there is such a feature.
    fn layer(&self, PlacedFeature { layer, position, feature }: PlacedFeature) -> Result<&FrozenLayer> {
        let frozen = self
            .layers
            .get(layer)
            .filter(|frozen| feature < frozen.transcoder.latents() && position < frozen.writings.len());
        frozen.ok_or_else(|| {
            InterpretError::Mismatch(format!("there is no feature {feature} of layer {layer} at {position}"))
        })
    }

    /// The backward pass from some targets to the embeddings, `(B, T, C)`, and what biases add on the way. `read` gets each layer's
    /// gradient at the output of its MLP, and the targets that it belongs to.
    fn walk(
        &self,
        starts: &[Start],
        mut read: impl FnMut(usize, &Tensor, &[Start]) -> candle_core::Result<()>,
    ) -> Result<(Option<Tensor>, Biases)> {
        // No gradient reaches tokens after the last target.
        let tokens = starts.iter().map(|start| start.position + 1).max().unwrap_or(1);
        let (mut begun, mut biases) = (0, Biases(None));
        let mut g = None;
        let of_layer = |layer: usize| starts.iter().filter(move |start| start.layer == layer);
        let of_logits: Vec<&Start> = of_layer(self.layers.len()).collect();
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
            let of_features: Vec<&Start> = of_layer(layer).collect();
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

    /// What features that are set to other values add to the outputs of the MLPs: edits that a run of the model takes.
    ///
    /// # Errors
    /// When a node is no feature, or the device has no memory left.
    pub fn edits(&self, changes: &[FeatureChange]) -> Result<Vec<Edit>> {
        let mut edits = Vec::new();
        for FeatureChange { node, value } in changes {
            let Some(GraphNode::Feature { layer, position, feature, activation }) = self.nodes.get(*node)
            else {
                return Err(InterpretError::Mismatch(format!("node {node} is not a feature")));
            };
            let feature = PlacedFeature { layer: *layer, position: *position, feature: *feature };
            edits.extend(self.addition(feature, value - activation)?);
        }
        Ok(edits)
    }

    /// Edits of a run that add `added` units of a feature, active or not, to the outputs of the MLPs.
    ///
    /// # Errors
    /// If there is no such feature, or the device has no memory left.
    pub fn addition(&self, feature: PlacedFeature, added: f64) -> Result<Vec<Edit>> {
        let mut edits = Vec::new();
        for (step, decoder) in self.layer(feature)?.transcoder.decoders.iter().enumerate() {
            let added = (decoder.get(feature.feature)? * added)?;
            let site = Site::in_block(feature.layer + step, SiteKind::MlpOut);
            edits.push(Add::new(site, added).at(Place::position(feature.position)));
        }
        Ok(edits)
    }
}

/// Where the way back of a target begins.
struct Start {
    /// Its row in the batch.
    row: usize,
    /// The layer that a feature reads; of a logit the number of layers.
    layer: usize,
    position: usize,
    /// Which feature of the layer, or which of the logits.
    reads: usize,
}

/// What a graph takes.
struct Sizes {
    features: usize,
    /// Directions that features write, one for each layer that they write to.
    written: usize,
    layers: usize,
    tokens: usize,
    width: usize,
}

impl Sizes {
    /// Bytes of the rows of the graph, of what nodes write, and of a batch on its way.
    fn bytes(&self, options: &GraphOptions, dtype: DType) -> u64 {
        let sizes = [self.features, self.written, self.layers, self.tokens, self.width];
        let [features, written, layers, tokens, width] = sizes.map(|size| size as u64);
        let columns = features + (layers + 2) * tokens;
        let rows = features.min(options.max_feature_nodes as u64) + MAX_LOGITS as u64;
        let batch = BATCH as u64
            * (columns * 8 + BATCH_TENSORS as u64 * tokens * width * dtype.size_in_bytes() as u64);
        // The rows are there twice while those of features without a node are left out.
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

/// What the encoder of a layer reads, and what it finds there.
struct ReadLayer {
    /// The norm between the residual stream and the encoder.
    norm: Option<FrozenNorm>,
    /// `(T, C)`.
    x: Tensor,
    active: Vec<Active>,
    /// The node of the first active feature.
    first_node: usize,
}

impl Transcoders {
    /// The features of each layer in a run, `(T, F)`.
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
    /// If the transcoders are of another model or on another device, and those of the model.
    pub fn latents(&self, run: &Run) -> Result<Vec<Tensor>> {
        let seen = Seen::of(run, DType::F32)?;
        let blocks = run.model.transformer().blocks().iter().zip(self.layers()).enumerate();
        let latents = blocks.map(|(layer, (block, transcoder))| {
            let norm = FrozenNorm::before_encoder(&seen, layer, block, self.input())?;
            let x = seen.read(layer, norm.as_ref())?;
            Ok(transcoder.encoder.activate(&transcoder.encoder.pre_activations(&x)?)?)
        });
        latents.collect()
    }
}

fn read_layers(
    seen: &Seen,
    model: &Gpt2LMHeadModel,
    transcoders: &Transcoders,
    skips_first: bool,
    mut check: impl FnMut(usize, usize) -> Result<()>,
) -> Result<Vec<ReadLayer>> {
    let mut read = Vec::new();
    let mut first_node = 0;
    for (layer, block) in model.transformer().blocks().iter().enumerate() {
        let encoder = &transcoders.layers()[layer].encoder;
        let norm = FrozenNorm::before_encoder(seen, layer, block, transcoders.input())?;
        let x = seen.read(layer, norm.as_ref())?;
        let before = encoder.pre_activations(&x)?;
        let latents = encoder.activate(&before)?;
        let mut active = Vec::new();
        // One position after the other, since a layer may have more features active than there is room for.
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

/// What nodes write to the MLP output of a layer, `output` `(T, C)`, at each position: features of this layer, those of earlier ones
/// that write here too, and what is left, which the error writes.
fn writings(
    layer: usize,
    output: &Tensor,
    read: &[ReadLayer],
    transcoders: &Transcoders,
    first_error: usize,
) -> candle_core::Result<Vec<Writing>> {
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
    let writing = |(position, (mut nodes, mut directions)): (usize, (Vec<usize>, Vec<Tensor>))| {
        let mut error = rest.narrow(0, position, 1)?;
        for written in &directions {
            error = (error - written.sum_keepdim(0)?)?;
        }
        nodes.push(first_error + position);
        directions.push(error);
        Ok(Writing { nodes, directions: Tensor::cat(&directions, 0)?.t()?.contiguous()? })
    };
    parts.into_iter().enumerate().map(writing).collect()
}

/// The part of a reconstruction that no feature writes, `(T, C)`.
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

/// What active features write by a decoder `(F, C)`: `(N, C)`.
fn written(decoder: &Tensor, active: &[Active]) -> candle_core::Result<Tensor> {
    let device = decoder.device();
    let activations: Vec<f64> = active.iter().map(|one| one.activation).collect();
    let activations = Tensor::from_vec(activations, (active.len(), 1), &Device::Cpu)?;
    let features: Vec<i64> = active.iter().map(|one| one.feature as i64).collect();
    let features = Tensor::from_vec(features, active.len(), device)?;
    let activations = activations.to_dtype(decoder.dtype())?.to_device(device)?;
    decoder.index_select(&features, 0)?.broadcast_mul(&activations)
}

/// The nodes of the logits with their values, and what they are read by, `(N, C)`.
fn logits(model: &Gpt2LMHeadModel, seen: &Seen) -> candle_core::Result<(Vec<(GraphNode, f64)>, Tensor)> {
    let weight = seen.cast(&model.lm_head().weight().to_tensor()?)?; // (V, C)
    let hidden = seen.outside(SiteKind::FinalNorm)?;
    let last = hidden.narrow(0, hidden.dim(0)? - 1, 1)?; // (1, C)
    let logits = doubles(&last.matmul(&weight.t()?)?)?.squeeze(0)?.to_vec1::<f64>()?;
    let mean = logits.iter().sum::<f64>() / logits.len() as f64;
    let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let total: f64 = logits.iter().map(|logit| libm::exp(logit - most)).sum();
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
    let (mut nodes, mut share) = (Vec::new(), 0.0);
    for id in order.into_iter().take(MAX_LOGITS) {
        if share >= LOGIT_SHARE {
            break;
        }
        let probability = libm::exp(logits[id] - most) / total;
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

/// Which feature or logit each start reads.
fn indices(starts: &[&Start], device: &Device) -> candle_core::Result<Tensor> {
    let reads: Vec<i64> = starts.iter().map(|start| start.reads as i64).collect();
    Tensor::from_vec(reads, starts.len(), device)
}

/// Rows `(B, C)`, each at the position of its start and zeros elsewhere: `(B, T, C)`.
fn scattered(read: &Tensor, starts: &[&Start], tokens: usize) -> candle_core::Result<Tensor> {
    let device = read.device();
    let mut places = vec![0f32; starts.len() * tokens];
    starts.iter().enumerate().for_each(|(row, start)| places[row * tokens + start.position] = 1.0);
    let places = Tensor::from_vec(places, (starts.len(), tokens, 1), device)?.to_dtype(read.dtype())?;
    places.broadcast_mul(&read.unsqueeze(1)?)
}

fn doubles(x: &Tensor) -> candle_core::Result<Tensor> {
    x.to_device(&Device::Cpu)?.to_dtype(DType::F64)
}
