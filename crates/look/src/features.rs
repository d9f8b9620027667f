//! Active features of a sparse autoencoder, in one text or in many with examples of each feature.

use std::fs;
use std::path::{Path, PathBuf};

use candle_gpt2::SiteKind;
use candle_gpt2_engine::{BUILT_IN, Reporter, Unit};
use candle_gpt2_interpret::{
    Dictionary, FeatureExample, FeatureExamples, FeatureLogits, FeatureSummary, Processing, feature_logits,
    record_rows,
};
use candle_gpt2_pictures::{
    Axis, FeatureCard, FeatureHistogram, FeatureQuantile, FeatureText, Report, Scale,
};
use candle_gpt2_weights::{create_folder, expect_free};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::error::{Result, invalid_option};
use crate::files::TextFile;
use crate::frontend::cantor_pair;
use crate::{Analysis, Look, LookError, LookSubject, Ranges, Reader, Text, read_dictionary};

/// Memory limit for feature examples, in bytes.
const MOST_BYTES: u64 = 1 << 30;
/// Maximum number of tokens in a batch.
const BATCH_TOKENS: usize = 2048;
/// Number of tokens listed as most promoted and as most suppressed by a feature.
pub(crate) const LOGITS: usize = 10;
/// Number of tokens shown in a table on each side of the strongest token.
const SHOWN: usize = 6;
/// Token dimension of activations, `(1, T, …)`.
const TOKEN_DIM: usize = 1;
/// Names of the activation quarters that group a feature's texts.
const QUARTERS: [&str; 4] = ["Strongest quarter", "Second quarter", "Third quarter", "Weakest quarter"];

/// The dictionary features most active in a text, or examples of each feature from a file.
///
/// Examples of a feature are its strongest texts and a sample from each quarter of the texts in which it is
/// active. They come with the logits that the feature raises and lowers, and a histogram of its activations.
///
/// ```
/// use candle_gpt2_engine::Silent;
/// use candle_gpt2_look::{Features, Look, Reader, LookSubject, Text};
///
/// # let model = candle_gpt2_engine::ModelOptions::default().open(&Silent)?.load(&Silent)?;
/// # let reader = Reader::without_bos(model.vocabulary());
/// # let subject = LookSubject::new(&model, "built-in".into(), &reader);
/// let text = Text::Words("One day, Mia was".into());
/// let features = Features { text: Some(text), ..Features::new("no/such/folder".into()) };
/// let error = features.at(&subject, &Silent).err().ok_or("expected an error")?;
/// assert!(error.to_string().contains("no/such/folder"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct Features {
    /// Text to analyze, or `None` to collect examples of all features from `prompts_file` only.
    #[serde(default)]
    #[cfg_attr(feature = "clap", arg(skip))]
    pub text: Option<Text>,
    /// The sparse autoencoder or transcoder: a folder with cfg.json and sae_weights.safetensors,
    /// a .pt file, or built-in: the built-in model's transcoder at --site, or else in its middle block
    #[serde(default = "usual_sae")]
    #[cfg_attr(feature = "clap", arg(long, value_name = "PATH", default_value = BUILT_IN))]
    pub sae: PathBuf,
    /// Hook point that the dictionary was trained on, if its files do not specify one
    #[cfg_attr(feature = "clap", arg(long, value_name = "SITE"))]
    pub site: Option<String>,
    /// Number of features to show, selected by their peak activation in the text
    #[serde(default = "usual_top")]
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = usual_top()))]
    pub top: usize,
    /// Collect examples of each feature from this file: one text per line, or in a .jsonl file
    /// JSON objects with `text` or `ids`
    #[serde(default)]
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE"))]
    pub prompts_file: Option<PathBuf>,
    /// Only these features: 3, 0-5 or 0,4,8-11 [default: the --top strongest in the text, or all]
    #[serde(default)]
    #[cfg_attr(feature = "clap", arg(long, value_name = "FEATURES"))]
    pub features: Option<Ranges>,
    /// Number of top-activating texts per feature, and number of texts sampled from each quarter of the
    /// texts that activate it
    #[serde(default = "usual_examples")]
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = usual_examples()))]
    pub examples: usize,
    /// Write a JSON file for each feature into this new folder, in circuit-tracer's frontend format
    #[serde(default)]
    #[cfg_attr(feature = "clap", arg(long, value_name = "DIR"))]
    pub features_dir: Option<PathBuf>,
}

fn usual_sae() -> PathBuf {
    BUILT_IN.into()
}

fn usual_top() -> usize {
    20
}

pub(crate) fn usual_examples() -> usize {
    6
}

impl Features {
    /// Creates options for the dictionary at this path.
    pub fn new(sae: PathBuf) -> Self {
        Self {
            text: None,
            sae,
            site: None,
            top: usual_top(),
            prompts_file: None,
            features: None,
            examples: usual_examples(),
            features_dir: None,
        }
    }

    /// Opens the dictionary and checks that it fits the model.
    fn open(&self, reader: &Reader) -> Result<Dictionary> {
        read_dictionary(&self.sae, self.site.as_deref(), reader.config())
    }
}

/// Writes each feature to a file `NUMBER.json`, in circuit-tracer's frontend format.
///
/// Nodes of an attribution graph use the same number for the feature.
fn write_features(folder: &Path, layer: Option<usize>, features: &[FeatureCard]) -> Result<()> {
    Ok(create_folder(folder, |partial| {
        for feature in features {
            let number = layer.map_or(feature.index, |layer| cantor_pair(layer, feature.index));
            fs::write(partial.join(format!("{number}.json")), serde_json::to_vec(feature)?)?;
        }
        Ok(())
    })?)
}

/// Validated options of [`Features`]: the text or texts, and the dictionary.
///
/// Returned by [`Features`]'s `check`.
#[derive(Debug)]
pub struct CheckedFeatures {
    ids: Option<Vec<u32>>,
    dictionary: Dictionary,
    /// Selected feature indices.
    features: Option<Vec<usize>>,
    texts: Option<TextFile>,
}

impl Look for Features {
    type Checked = CheckedFeatures;

    fn check(&self, reader: &Reader) -> Result<CheckedFeatures> {
        if self.text.is_none() && self.prompts_file.is_none() {
            return Err(invalid_option("pass a text, or `prompts_file` with texts to collect examples from"));
        }
        if let Some(folder) = &self.features_dir {
            if self.prompts_file.is_none() {
                return Err(invalid_option(
                    "`features_dir` requires `prompts_file` with texts to collect examples from",
                ));
            }
            expect_free(folder)?;
        }
        let ids = self.text.as_ref().map(|text| reader.text(text)).transpose()?;
        let dictionary = self.open(reader)?;
        let latents = dictionary.latents();
        let features = self
            .features
            .as_ref()
            .map(|features| reader.numbers("features", features, latents))
            .transpose()?;
        let count = match (&features, &ids) {
            (Some(features), _) => features.len(),
            (None, Some(_)) => self.top.min(latents),
            (None, None) => latents,
        };
        let texts = match &self.prompts_file {
            Some(path) => {
                check_examples(self.examples, count)?;
                Some(TextFile::read(path)?)
            }
            None => None,
        };
        Ok(CheckedFeatures { ids, dictionary, features, texts })
    }

    fn look(
        &self,
        checked: CheckedFeatures,
        subject: &LookSubject,
        reporter: &dyn Reporter,
    ) -> Result<Analysis> {
        let dictionary = checked.dictionary.to_device(subject.model().device())?;
        let site = dictionary.config().site;
        let (mut report, features, details) = match &checked.ids {
            Some(ids) => self.in_text(ids, checked.features, &dictionary, subject)?,
            None => {
                // Rejects a model whose logits are not finite.
                subject.run(&[0])?;
                let report = subject.report("features", format!("features of {site}"), &[]);
                let all = || (0..dictionary.latents()).collect();
                (report, checked.features.unwrap_or_else(all), json!({ "site": site.to_string() }))
            }
        };
        let mut cards = Vec::new();
        if let Some(texts) = &checked.texts {
            let examples = self.collect_examples(texts, &features, &dictionary, subject, reporter)?;
            let logits = feature_logits(subject.model(), &dictionary, &features, LOGITS)?;
            report.notes.push(format!(
                "examples: {} tokens from {} texts, {}; the first token of each text is left out",
                examples.tokens(),
                examples.texts(),
                subject.in_front()
            ));
            if logits.is_none() {
                report.notes.push(format!(
                    "no logits, because {} does not write to the residual stream",
                    dictionary.explained_site()
                ));
            }
            let collected = CollectedFeatures {
                subject,
                logits,
                tokens: examples.tokens(),
                summaries: examples.finish(),
            };
            if checked.ids.is_none() {
                collected.list(&mut report);
            }
            cards = collected.cards();
            if let Some(folder) = &self.features_dir {
                write_features(folder, site.layer, &cards)?;
                report.notes.push(format!("wrote {} features to {}", cards.len(), folder.display()));
            }
        }
        if dictionary.config().prepends_bos == Some(true) && !subject.has_bos() {
            report.notes.push(
                "warning: the dictionary was trained with a BOS token before each text, but these texts have none"
                    .into(),
            );
        }
        if site.kind != SiteKind::Z && dictionary.config().needs_centering() {
            report.notes.push("the mean of the residual stream is subtracted, as in training".into());
        }
        Ok(Analysis { features: cards, ..Analysis::new(report, details) })
    }
}

impl Features {
    /// Analyzes one text.
    ///
    /// Returns a report of features by token, the indices of the features in the report, and details on how
    /// well all features explain the text.
    fn in_text(
        &self,
        ids: &[u32],
        chosen: Option<Vec<usize>>,
        dictionary: &Dictionary,
        subject: &LookSubject,
    ) -> Result<(Report, Vec<usize>, Value)> {
        let site = dictionary.config().site;
        let explained_site = dictionary.explained_site();
        let record = subject.run(ids)?.record([site, explained_site])?;
        let processing = Processing::new(subject.model())?;
        let input = dictionary.input(record.get(site)?, &processing)?;
        let target = dictionary.target(record.get(explained_site)?, &processing)?;
        let latents = dictionary.encode(&input)?.flatten_to(1)?; // (T, F)
        let explained = dictionary.explained_target(&input, &target)?;
        let rows = latents.to_vec2::<f32>()?;
        let largest: Vec<f32> = latents.max(0)?.to_vec1()?;
        let mut order: Vec<usize> = (0..largest.len()).filter(|feature| largest[*feature] > 0.0).collect();
        order.sort_by(|a, b| largest[*b].total_cmp(&largest[*a]).then(a.cmp(b)));
        let active = order.len();
        order.truncate(self.top.max(1));
        let order = chosen.unwrap_or(order);
        let mut report = subject.report("features", format!("features of {site}"), ids);
        report.axes = vec![
            Axis::new("feature", order.iter().map(usize::to_string)),
            Axis::tokens("token", &report.tokens),
        ];
        report.values = order.iter().flat_map(|feature| rows.iter().map(|row| Some(row[*feature]))).collect();
        report.scale = Scale::Amount;
        report.notes.push(format!(
            "{active} of {} features are active; {:.1} per token on average",
            dictionary.latents(),
            explained.mean_l0
        ));
        if let Some(share) = explained.variance_explained {
            let of = match explained_site == site {
                true => String::new(),
                false => format!(" of {explained_site}"),
            };
            report.notes.push(format!("the features explain {share:.3} of the variance{of}"));
        }
        let values = json!({
            "mean_l0": explained.mean_l0, "variance_explained": explained.variance_explained, "mse": explained.mse,
        });
        Ok((report, order, json!({ "site": site.to_string(), "explained": values })))
    }

    /// Collects examples in batches, so that only a few tokenized texts are in memory.
    fn collect_examples(
        &self,
        texts: &TextFile,
        features: &[usize],
        dictionary: &Dictionary,
        subject: &LookSubject,
        reporter: &dyn Reporter,
    ) -> Result<FeatureExamples> {
        let processing = Processing::new(subject.model())?;
        let mut examples = FeatureExamples::new(features.to_vec(), self.examples);
        let site = dictionary.config().site;
        let mut read = |batch: &mut Vec<Vec<u32>>| -> Result<()> {
            if batch.is_empty() {
                return Ok(());
            }
            let ids: Vec<&[u32]> = batch.iter().map(|text| &text[..]).collect();
            let record = record_rows(subject.model(), &ids, [site])?;
            let input = dictionary.input(record.get(site)?, &processing)?;
            let mut start = 0;
            for text in ids {
                let latents = dictionary.encode(&input.narrow(TOKEN_DIM, start, text.len())?)?.squeeze(0)?;
                examples.add(text, &latents)?;
                start += text.len();
            }
            batch.clear();
            Ok(())
        };
        let lines = texts.len();
        let bar = reporter.start("collecting examples", lines as u64, Unit::Items("texts"));
        let (mut batch, mut tokens) = (Vec::new(), 0);
        for index in 0..lines {
            for text in texts.sequences(index, subject.reader())? {
                if tokens + text.len() > BATCH_TOKENS {
                    read(&mut batch)?;
                    tokens = 0;
                }
                tokens += text.len();
                batch.push(text);
            }
            bar.advance(1);
        }
        read(&mut batch)?;
        if examples.tokens() == 0 {
            let error =
                invalid_option("expected texts of at least two tokens; the first token of each is left out");
            return Err(LookError::In { origin: texts.path().display().to_string(), error: Box::new(error) });
        }
        Ok(examples)
    }
}

/// Checks that `examples` texts for each of `features` features fit into memory.
pub(crate) fn check_examples(examples: usize, features: usize) -> Result<()> {
    if examples == 0 {
        return Err(invalid_option("`examples`: expected at least 1"));
    }
    let bytes = FeatureExamples::max_bytes(features, examples);
    if bytes > MOST_BYTES {
        return Err(invalid_option(format!(
            "`examples` {examples}: {features} features may need {} MiB, more than {} MiB; \
             lower `examples`, or select fewer `features`",
            bytes >> 20,
            MOST_BYTES >> 20
        )));
    }
    Ok(())
}

/// Features with the statistics collected from texts.
pub(crate) struct CollectedFeatures<'a> {
    pub(crate) subject: &'a LookSubject<'a>,
    pub(crate) summaries: Vec<FeatureSummary>,
    /// Top and bottom logits of each feature; `None` if features add nothing to the residual stream.
    pub(crate) logits: Option<Vec<FeatureLogits>>,
    /// Number of tokens in all texts.
    pub(crate) tokens: u64,
}

impl CollectedFeatures<'_> {
    fn density(&self, summary: &FeatureSummary) -> f32 {
        summary.active as f32 / self.tokens as f32
    }

    /// Lists the features in the report: how often each is active, and its strongest text.
    fn list(&self, report: &mut Report) {
        let silent = self.summaries.iter().filter(|summary| summary.active == 0).count();
        let features = self.summaries.iter();
        report.axes = vec![Axis::new("feature", features.clone().map(|summary| summary.feature.to_string()))];
        report.values = features.clone().map(|summary| Some(self.density(summary))).collect();
        report.texts = features.map(|summary| self.strongest(summary)).collect();
        report.scale = Scale::Amount;
        report.notes.push(format!(
            "values: fraction of the tokens at which a feature is active; {silent} of {} are never active",
            self.summaries.len()
        ));
    }

    /// Excerpt of the strongest text around its strongest token.
    fn strongest(&self, summary: &FeatureSummary) -> String {
        let Some(text) = summary.strongest.first() else { return String::new() };
        let words = |ids: &[u32]| ids.iter().map(|id| self.subject.printable(*id)).collect::<String>();
        let (before, rest) = text.ids.split_at(text.strongest);
        let (strongest, after) = rest.split_at(1);
        let before = &before[before.len().saturating_sub(SHOWN)..];
        let after = &after[..after.len().min(SHOWN)];
        format!("{}[{}]{}", words(before), words(strongest), words(after))
    }

    pub(crate) fn cards(&self) -> Vec<FeatureCard> {
        let texts = |ids: &mut dyn Iterator<Item = u32>| ids.map(|id| self.subject.token_text(id)).collect();
        let card = |(place, summary): (usize, &FeatureSummary)| {
            let logits = self.logits.as_ref().map(|logits| &logits[place]);
            let tokens = |logits: &[(u32, f32)]| texts(&mut logits.iter().map(|(id, _)| *id));
            let example = |example: &FeatureExample, is_repeated_datapoint: bool| FeatureText {
                tokens: texts(&mut example.ids.iter().copied()),
                tokens_acts_list: example.activations.clone(),
                train_token_ind: example.strongest,
                is_repeated_datapoint,
            };
            let is_above = |text: usize| summary.strongest.iter().any(|example| example.text == text);
            let strongest = FeatureQuantile {
                quantile_name: "Top activations".into(),
                examples: summary.strongest.iter().map(|text| example(text, false)).collect(),
            };
            let quarters = QUARTERS.iter().zip(&summary.quarters).map(|(name, quarter)| FeatureQuantile {
                quantile_name: (*name).into(),
                examples: quarter.iter().map(|text| example(text, is_above(text.text))).collect(),
            });
            let histogram = &summary.histogram;
            FeatureCard {
                index: summary.feature,
                density: self.density(summary),
                act_min: summary.least,
                act_max: summary.largest,
                histogram: FeatureHistogram {
                    bin_width: histogram.width,
                    counts: histogram.counts().to_vec(),
                },
                top_logits: logits.map(|logits| tokens(&logits.top)).unwrap_or_default(),
                bottom_logits: logits.map(|logits| tokens(&logits.bottom)).unwrap_or_default(),
                examples_quantiles: std::iter::once(strongest).chain(quarters).collect(),
            }
        };
        self.summaries.iter().enumerate().map(card).collect()
    }
}
