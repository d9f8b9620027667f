//! Analyses in pieces. What needs the model is computed a few tokens at a time, so that other clients' texts continue in between, and
//! what needs none on any thread.

use std::fmt;
use std::ops::ControlFlow::{self, Break, Continue};
use std::vec::IntoIter;

use candle_core::Tensor;
use candle_gpt2::{Gpt2LMHeadModel, LogitsFor, Site, SiteKind};
use candle_gpt2_engine::{Classification, Classifier, LoadedModel, Question};
use candle_gpt2_interpret::{
    LensCell, LensOptions, Patterns, Record, Recording, ReplacementModel, Run, lens_cells, lens_logits_at,
    lens_logprobs, residual_sites,
};
use candle_gpt2_look::{Attention, Lens, Reading, feature_in_text, strongest_features};
use candle_gpt2_pictures::{data, graph_data};

use crate::answer::json;
use crate::classify::{ClassifyAnswer, ClassifyCall};
use crate::embeddings::{EmbeddingsAnswer, EmbeddingsCall};
use crate::look::{
    AttentionRequest, FeatureRequest, FeaturesRequest, GraphRequest, HeadRequest, LensRequest, NextRequest,
    refused,
};
use crate::{ApiError, Reply, ServedModel};

/// The axis of the tokens in hidden states, `(1, T, C)`.
const TOKEN_DIM: usize = 1;

/// An analysis of texts: attention, the lens, a head, what may follow, embeddings, labels. [`Analysis::compute`], or
/// [`Analysis::classify`] if the model is a classifier, and [`Analysis::conclude`] are called in turn until there is an answer.
/// [`Work::Analysis`](crate::Work) holds it.
pub struct Analysis {
    piece: Piece,
    texts: usize,
    prompt_tokens: usize,
}

/// What is to be done next.
enum Piece {
    /// What may follow a text, of which nothing is read.
    Next(Box<NextRequest>),
    /// A text is to be recorded.
    Record { ids: Vec<u32>, sites: Vec<Site>, then: Then<Record> },
    /// It is being recorded, a few tokens at a time.
    Recording(Box<Recording>, Then<Record>),
    /// Something else is to be computed, of as many tokens at most.
    Compute(Computation),
    /// Texts are to be labelled.
    Label(Box<Labelling>),
    /// That was done, and this needs no model.
    Conclude(Conclusion),
}

type Computation = Box<dyn FnOnce(&Gpt2LMHeadModel, usize) -> Result<Conclusion, ApiError> + Send>;
type Conclusion = Box<dyn FnOnce(&ServedModel) -> Concluded + Send>;
type Then<T> = Box<dyn FnOnce(T, &ServedModel) -> Concluded + Send>;

/// Questions to a classifier that are not answered yet, and what it said to those before.
struct Labelling {
    questions: IntoIter<Question>,
    classified: Vec<Classification>,
    answer: ClassifyAnswer,
}

/// The answer, or what is to be done next.
type Concluded = Result<ControlFlow<Reply, Piece>, ApiError>;

impl Analysis {
    pub(crate) fn attention(request: AttentionRequest) -> Self {
        let AttentionRequest { ids, heads, warnings } = request;
        Self::of(record(ids.clone(), Patterns::sites(&heads), move |record, served| {
            let report = Attention::report(record, &ids, &heads, served.name(), &served.reader())?;
            Ok(Break(Reply::new(data(&report), warnings)))
        }))
    }

    pub(crate) fn head(HeadRequest { head, warnings }: HeadRequest) -> Self {
        Self::of(record(head.ids().to_owned(), head.sites(), move |record, served| {
            let steps = head.steps(&record, &served.reader()).map_err(ApiError::failed)?;
            Ok(Break(Reply::new(json(&steps), warnings)))
        }))
    }

    pub(crate) fn next(request: NextRequest) -> Self {
        Self::of(Piece::Next(Box::new(request)))
    }

    pub(crate) fn lens(request: LensRequest, served: &ServedModel) -> Self {
        let sites = residual_sites(served.config().n_layer).collect();
        Self::of(record(request.ids.clone(), sites, |record, _| {
            let residuals = record.values.into_values().collect();
            let lens =
                LensPass { request, residuals, layer: None, token: 0, last: Vec::new(), cells: Vec::new() };
            Ok(Continue(lens.next_piece()))
        }))
    }

    pub(crate) fn features(request: FeaturesRequest) -> Self {
        let sites = request.dictionaries.iter().map(|(_, dictionary)| dictionary.config().site).collect();
        Self::of(record(request.ids.clone(), sites, move |record, served| {
            let (reader, name) = (served.reader(), served.name().to_owned());
            let FeaturesRequest { ids, dictionaries, top, warnings } = request;
            let of = move |model: &Gpt2LMHeadModel, _| {
                let layers: Vec<_> =
                    dictionaries.iter().map(|(layer, dictionary)| (*layer, dictionary)).collect();
                strongest_features(&record, &ids, &layers, top, model, &name, &reader).map_err(refused)
            };
            Ok(Continue(compute(of, |report, _| Ok(Break(Reply::new(data(&report), warnings))))))
        }))
    }

    pub(crate) fn feature(request: FeatureRequest) -> Self {
        let sites = vec![request.dictionary.config().site];
        Self::of(record(request.ids.clone(), sites, move |record, served| {
            let reader = served.reader();
            let FeatureRequest { ids, dictionary, feature, warnings } = request;
            let of = move |model: &Gpt2LMHeadModel, _| {
                feature_in_text(&record, &ids, (&dictionary, feature), model, &reader).map_err(refused)
            };
            Ok(Continue(compute(of, |card, _| Ok(Break(Reply::new(json(&card), warnings))))))
        }))
    }

    /// The model is needed for its replacement alone; tracing takes the longest, and needs none.
    pub(crate) fn graph(GraphRequest { ids, transcoders, graph, warnings }: GraphRequest) -> Self {
        let (of_ids, options) = (ids.clone(), graph.options());
        let of = move |model: &Gpt2LMHeadModel, _| {
            let replaced =
                Run::new(model, &of_ids).and_then(|run| ReplacementModel::new(&run, &transcoders, &options));
            replaced.map_err(|error| refused(error.into()))
        };
        Self::of(compute(of, move |replacement, served| {
            let traced = graph.of_replacement(&replacement, &ids, served.name(), &served.reader());
            let (report, picture) = traced.map_err(refused)?;
            Ok(Break(Reply::new(graph_data(&report, &picture), warnings)))
        }))
    }

    pub(crate) fn embeddings(EmbeddingsCall { rows, answer }: EmbeddingsCall) -> Self {
        let (texts, prompt_tokens) = (rows.len(), answer.prompt_tokens());
        Self { piece: embedding(rows.into_iter(), answer), texts, prompt_tokens }
    }

    pub(crate) fn labels(ClassifyCall { questions, answer }: ClassifyCall) -> Self {
        let (texts, prompt_tokens) = (questions.len(), answer.prompt_tokens());
        let labelling = Labelling { questions: questions.into_iter(), classified: Vec::new(), answer };
        Self { piece: Piece::Label(Box::new(labelling)), texts, prompt_tokens }
    }

    fn of(piece: Piece) -> Self {
        Self { piece, texts: 1, prompt_tokens: 0 }
    }

    /// Texts that it is of.
    pub fn texts(&self) -> usize {
        self.texts
    }

    /// Tokens of prompts that the request counts, as its answer tells: those of texts to embed or to label.
    pub fn prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }

    /// Computes the next piece: at most so many tokens. All at once are those of the library, bit for bit.
    ///
    /// # Errors
    /// Those of the model.
    pub fn compute(self, model: &LoadedModel, tokens: usize) -> Result<Self, ApiError> {
        let mut piece = self.piece;
        let model = model.model();
        if let Piece::Next(request) = piece {
            piece = next(*request);
        }
        if let Piece::Record { ids, sites, then } = piece {
            let recording = Recording::new(model, ids, sites).map_err(ApiError::failed)?;
            piece = Piece::Recording(Box::new(recording), then);
        }
        let piece = match piece {
            Piece::Recording(mut recording, then) => {
                recording.advance(model, tokens)?;
                match recording.is_complete() {
                    true => Piece::Conclude(Box::new(|served| then(recording.into_record()?, served))),
                    false => Piece::Recording(recording, then),
                }
            }
            Piece::Compute(of) => Piece::Conclude(of(model, tokens)?),
            Piece::Label(_) => return Err(ApiError::failed("labels, asked of a language model")),
            piece => piece,
        };
        Ok(Self { piece, ..self })
    }

    /// Computes the next piece of labels: those of at most so many texts, and of at least one.
    ///
    /// # Errors
    /// Those of the classifier.
    ///
    /// ```
    /// use std::ops::ControlFlow;
    ///
    /// use candle_gpt2_api::{ApiOptions, Endpoint, ServedModel, Work};
    ///
    /// # let options = candle_gpt2_engine::ModelOptions { model: candle_gpt2_testing::fixture_path("heads/sequence"), ..Default::default() };
    /// # let classifier = options.open_classifier(&candle_gpt2_engine::Silent)?.load_classifier(&candle_gpt2_engine::Silent)?;
    /// let served = ServedModel::of_classifier(&classifier, ApiOptions::default());
    /// let body = br#"{"input": ["the sea", "a wood"]}"#;
    /// let Work::Analysis(analysis) = served.read(Endpoint::Classify, body, None)? else { panic!("labels are an analysis") };
    /// assert_eq!(analysis.texts(), 2);
    /// let ControlFlow::Break(reply) = analysis.classify(&classifier, 2)?.conclude(&served)? else { panic!("both are labelled") };
    /// assert!(reply.json.contains(r#""num_classes":5"#), "{}", reply.json);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn classify(self, classifier: &Classifier, texts: usize) -> Result<Self, ApiError> {
        let piece = match self.piece {
            Piece::Label(mut labelling) => {
                let questions: Vec<Question> = labelling.questions.by_ref().take(texts.max(1)).collect();
                let classified = classifier.classify(&questions).map_err(ApiError::failed)?;
                labelling.classified.extend(classified);
                match labelling.questions.len() {
                    0 => Piece::Conclude(Box::new(move |_| {
                        Ok(Break(labelling.answer.into_reply(&labelling.classified)))
                    })),
                    _ => Piece::Label(labelling),
                }
            }
            _ => return Err(ApiError::failed("a look into a language model, asked of a classifier")),
        };
        Ok(Self { piece, ..self })
    }

    /// Does what the piece needs besides the model, and gives the answer if it was the last; otherwise the analysis, for the next.
    ///
    /// # Errors
    /// When the request leaves nothing to answer with, or something fails inside.
    pub fn conclude(self, served: &ServedModel) -> Result<ControlFlow<Reply, Self>, ApiError> {
        let concluded = match self.piece {
            Piece::Conclude(conclude) => conclude(served)?,
            piece => Continue(piece),
        };
        Ok(concluded.map_continue(|piece| Self { piece, ..self }))
    }

    /// Both, on all tokens at once. What may follow is asked again and again of the same text: `reading` is what was read of it.
    pub(crate) fn step(
        self,
        model: &LoadedModel,
        served: &ServedModel,
        reading: &mut Reading,
    ) -> Result<ControlFlow<Reply, Self>, ApiError> {
        if let Piece::Next(request) = self.piece {
            let logits = reading.logits(model.model(), &request.text, request.ids.len() - 1);
            return request.into_reply(&logits.map_err(ApiError::failed)?, served).map(Break);
        }
        self.compute(model, usize::MAX)?.conclude(served)
    }
}

fn record(
    ids: Vec<u32>,
    sites: Vec<Site>,
    then: impl FnOnce(Record, &ServedModel) -> Concluded + Send + 'static,
) -> Piece {
    Piece::Record { ids, sites, then: Box::new(then) }
}

/// Computes something with the model, and does the rest without.
fn compute<T: Send + 'static, E: Into<ApiError>>(
    of: impl FnOnce(&Gpt2LMHeadModel, usize) -> Result<T, E> + Send + 'static,
    then: impl FnOnce(T, &ServedModel) -> Concluded + Send + 'static,
) -> Piece {
    Piece::Compute(Box::new(|model, tokens| {
        let computed = of(model, tokens).map_err(Into::into)?;
        Ok(Box::new(|served| then(computed, served)))
    }))
}

/// Records what the output head reads, `(1, T, C)`.
fn record_hidden(ids: Vec<u32>, then: impl FnOnce(&Tensor) -> Concluded + Send + 'static) -> Piece {
    let site = Site::outside(SiteKind::FinalNorm);
    record(ids, vec![site], move |record, _| then(record.get(site)?))
}

fn next(request: NextRequest) -> Piece {
    record_hidden(request.ids.clone(), |hidden| {
        let hidden = hidden.clone();
        let of = move |model: &Gpt2LMHeadModel, _| model.head(&hidden, LogitsFor::LastToken);
        let then = move |logits: Tensor, served: &ServedModel| {
            request.into_reply(&logits.flatten_all()?.to_vec1()?, served).map(Break)
        };
        Ok(Continue(compute(of, then)))
    })
}

/// The vector of the next text, and of those after it.
fn embedding(mut rows: IntoIter<Vec<u32>>, mut answer: EmbeddingsAnswer) -> Piece {
    record_hidden(rows.next().unwrap_or_default(), |hidden| {
        answer.add(&hidden.to_dtype(candle_core::DType::F32)?.flatten_all()?.to_vec1::<f32>()?);
        match rows.len() {
            0 => answer.into_reply().map(Break),
            _ => Ok(Continue(embedding(rows, answer))),
        }
    })
}

/// How far a lens is. Of a text of 128 tokens the logits of all layers together would take hundreds of megabytes.
struct LensPass {
    request: LensRequest,
    /// The residual stream at each layer, `(1, T, C)`.
    residuals: Vec<Tensor>,
    /// The layer that is read; `None` while the predictions of the last one are, which all are compared with.
    layer: Option<usize>,
    /// The token that is read next.
    token: usize,
    /// The last layer's logarithms of probabilities, a row for each token.
    last: Vec<Vec<f32>>,
    cells: Vec<LensCell>,
}

impl LensPass {
    /// The logits of the next tokens of a layer, `(1, T, V)`.
    fn next_piece(self) -> Piece {
        let (last_layer, first) = (self.residuals.len() - 1, self.token);
        let layer = self.layer.unwrap_or(last_layer);
        let (residual, rest) = (self.residuals[layer].clone(), self.request.ids.len() - first);
        let of = move |model: &Gpt2LMHeadModel, tokens: usize| {
            let residual = residual.narrow(TOKEN_DIM, first, tokens.clamp(1, rest))?.contiguous()?; // (1, T, C)
            lens_logits_at(model, layer, residual, &|_, x| Ok(x))
        };
        compute(of, |logits, served| self.read(&logits, served))
    }

    fn read(mut self, logits: &Tensor, served: &ServedModel) -> Concluded {
        let (predicted, first, ids) = (lens_logprobs(logits)?, self.token, &self.request.ids);
        self.token += predicted.len();
        if self.layer.is_none() {
            self.last.extend(predicted);
        } else {
            let options = LensOptions { top: 1, watch: Vec::new() };
            let next = ids.get(first + 1..).unwrap_or_default();
            self.cells.extend(lens_cells(&predicted, &self.last[first..], &options, next));
        }
        if self.token == ids.len() {
            (self.token, self.layer) = (0, Some(self.layer.map_or(0, |layer| layer + 1)));
        }
        if self.layer != Some(self.residuals.len()) {
            return Ok(Continue(self.next_piece()));
        }
        let (cells, LensRequest { ids, show, warnings }) =
            (self.cells.iter().collect::<Vec<_>>(), self.request);
        let report = Lens::report("logit lens", show, &cells, &ids, served.name(), &served.reader());
        Ok(Break(Reply::new(data(&report), warnings)))
    }
}

impl fmt::Debug for Analysis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Analysis").finish_non_exhaustive()
    }
}
