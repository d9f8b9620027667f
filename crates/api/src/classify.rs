//! `/v1/classify`, and vLLM's path `/classify`: labels for texts, or for each token of a text.
//!
//! Source: vLLM's `ClassificationRequest` and `ClassificationResponse`
//! (`entrypoints/pooling/classify/protocol.py`). In addition to `label` and `probs`, each entry has `labels`,
//! or `tokens` for a token classifier, in the format of `gpt2 classify --json`.

use candle_gpt2_engine::{Classification, EngineError, Label, Question};
use candle_gpt2_generation::GenerationError;
use serde::Serialize;

use crate::answer::json;
use crate::body::{Body, Fields, Text, fields};
use crate::completion::{Prompt, Prompts};
use crate::options::{MAX_ID_BYTES, MAX_NAME_BYTES, Truncation, check_request_id};
use crate::prompts::{check_ids, empty, to_read_with_places, too_long, unreadable};
use crate::served::fresh_number;
use crate::{ApiError, Reply, ServedModel, Warnings};

fields! {
    /// Fields of `/v1/classify`.
    ClassifyFields {
        /// The served name of the model, or an alias; may be absent.
        model: Option<Text<MAX_NAME_BYTES>>,
        /// Texts to classify. Names of special tokens in a text are parsed as special tokens.
        @required input: Option<Prompts>,
        /// Number of tokens to keep from the end of a text; -1 keeps all that fit into the context.
        /// If a text exceeds 1 MiB, only its end is read.
        truncate_prompt_tokens: Option<Truncation>,
        /// Whether `probs` are label scores; otherwise they are logits.
        use_activation | activation | softmax: bool = true,
        /// Suffix of the response's id, after `classify-`.
        request_id | rid: Option<Text<MAX_ID_BYTES>>,
    }
    ignored ["user", "priority", "add_special_tokens", "cache_salt", "mm_processor_kwargs"]
    refused [
        "messages": "pass the text as input",
        "truncation_side": "remove it, because only the last tokens of a long text can be kept",
    ]
}

/// Questions for a classifier, and the answer that collects the classifications.
#[derive(Debug)]
pub(crate) struct ClassifyCall {
    /// One question for each text.
    pub(crate) questions: Vec<Question>,
    /// Answer that receives the classifications.
    pub(crate) answer: ClassifyAnswer,
}

/// Answer that waits for the classifications.
#[derive(Debug)]
pub(crate) struct ClassifyAnswer {
    id: String,
    created: u64,
    model: String,
    prompt_tokens: usize,
    num_labels: usize,
    /// Whether `probs` contains scores instead of logits.
    use_activation: bool,
    warnings: Warnings,
}

impl ClassifyCall {
    pub(crate) fn read(body: &[u8], served: &ServedModel) -> Result<Self, ApiError> {
        let body = Body::parse(body, ClassifyFields::fields())?;
        let warnings = served.checked_warnings(&body)?;
        let fields: ClassifyFields = body.read()?;
        served.check_name(fields.model.as_ref())?;
        let input = Prompts::of_input(fields.input, served)?;
        check_request_id(fields.request_id.as_ref(), &body)?;
        let number = || format!("{:016x}{:016x}", fresh_number(), fresh_number());
        let id = fields.request_id.map_or_else(number, |Text(id)| id);
        let questions = questions(input, fields.truncate_prompt_tokens, served)?;
        let prompt_tokens = questions.iter().flat_map(Question::rows).map(<[u32]>::len).sum();
        let answer = ClassifyAnswer {
            id: format!("classify-{id}"),
            created: (served.options.now)(),
            model: served.name().to_owned(),
            prompt_tokens,
            num_labels: served.config().num_labels(),
            use_activation: fields.use_activation,
            warnings,
        };
        Ok(Self { questions, answer })
    }
}

fn questions(
    input: Prompts,
    truncation: Option<Truncation>,
    served: &ServedModel,
) -> Result<Vec<Question>, ApiError> {
    let n_positions = served.config().n_positions;
    let kept = match truncation {
        None => None,
        Some(Truncation::ToContext) => Some(n_positions),
        Some(Truncation::ToTokens(tokens)) => Some(tokens),
    };
    // If the request keeps more tokens than the context holds, a longer text is rejected rather than cut.
    let keep_last = kept.filter(|kept| *kept <= n_positions).map(|_| n_positions);
    let paths: Vec<String> = (0..input.prompts.len()).map(|prompt| input.path(prompt)).collect();
    let mut questions = Vec::with_capacity(paths.len());
    for (prompt, path) in input.prompts.into_iter().zip(&paths) {
        let question = match prompt {
            Prompt::Ids(ids) => {
                Question::of_ids(&served.vocabulary, check_ids(ids, path, served)?, keep_last)
            }
            Prompt::Text(text) => {
                let (read, _permit) = to_read_with_places(&text, keep_last.and(kept), path, served)?;
                let before = text.strip_suffix(read).unwrap_or_default().chars().count();
                Question::of_text(&served.vocabulary, read, keep_last)
                    .map(|question| question.shifted_by(before))
            }
        };
        let question = question.map_err(|error| refused(&error, path))?;
        questions.push(question.keep_last(kept.unwrap_or(usize::MAX)));
    }
    Ok(questions)
}

fn refused(error: &EngineError, path: &str) -> ApiError {
    match error {
        EngineError::Generation(GenerationError::EmptyPrompt) => empty(path),
        EngineError::Generation(GenerationError::PromptTooLong { tokens, n_positions }) => {
            let message = format!(
                "{path}: this model's context is {n_positions} tokens, but the text has {tokens}; shorten it, or set \
                 truncate_prompt_tokens"
            );
            too_long(message, path)
        }
        error => unreadable(error, path),
    }
}

impl ClassifyAnswer {
    /// Number of tokens in all texts.
    pub(crate) fn prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }

    /// Builds the reply from the classification of each text.
    pub(crate) fn into_reply(self, classifications: &[Classification]) -> Reply {
        let entries = classifications.iter().enumerate();
        let response = json(&Response {
            id: &self.id,
            object: "list",
            created: self.created,
            model: &self.model,
            data: entries.map(|(index, classification)| self.entry(index, classification)).collect(),
            usage: Usage {
                prompt_tokens: self.prompt_tokens,
                total_tokens: self.prompt_tokens,
                completion_tokens: 0,
                prompt_tokens_details: None,
            },
        });
        Reply::new(response, self.warnings)
    }

    fn entry<'a>(&self, index: usize, classification: &'a Classification) -> Entry<'a> {
        let (label, probs) = match classification {
            Classification::Labels { labels } => {
                (labels.first().map(|label| label.label.as_str()), Some(self.probs(labels)))
            }
            _ => (None, None),
        };
        Entry { index, label, probs, num_classes: self.num_labels, classification }
    }

    /// Label scores, or logits if the request asks for them, in the order of the label ids.
    fn probs(&self, labels: &[Label]) -> Vec<f64> {
        let mut probs = vec![0.0; labels.len()];
        for Label { id, score, logit, .. } in labels {
            if let Some(prob) = probs.get_mut(*id) {
                *prob = if self.use_activation { *score } else { f64::from(*logit) };
            }
        }
        probs
    }
}

#[derive(Serialize)]
struct Response<'a> {
    id: &'a str,
    object: &'a str,
    created: u64,
    model: &'a str,
    data: Vec<Entry<'a>>,
    usage: Usage,
}

#[derive(Serialize)]
struct Entry<'a> {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    label: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    probs: Option<Vec<f64>>,
    num_classes: usize,
    #[serde(flatten)]
    classification: &'a Classification,
}

#[derive(Serialize)]
struct Usage {
    prompt_tokens: usize,
    total_tokens: usize,
    completion_tokens: usize,
    /// Always null; vLLM's clients expect the key.
    prompt_tokens_details: Option<()>,
}
