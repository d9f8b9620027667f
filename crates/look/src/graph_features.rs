//! Meanings of an attribution graph's features: promoted tokens and example texts.

use std::collections::BTreeMap;

use candle_gpt2_engine::{BUILT_IN, Reporter, Unit};
use candle_gpt2_interpret::{FeatureExamples, FeatureLogits, Transcoders, direction_logits};
use candle_gpt2_pictures::FeatureCard;

use crate::error::Result;
use crate::features::{CollectedFeatures, LOGITS};
use crate::files::TextFile;
use crate::{LookSubject, Reader};

/// Number of tokens in a feature's name.
const NAMED: usize = 3;

/// Meanings of features, by layer and index.
pub(crate) struct Meanings {
    logits: BTreeMap<(usize, usize), FeatureLogits>,
    pub(crate) cards: BTreeMap<(usize, usize), FeatureCard>,
}

impl Meanings {
    /// Computes the meanings of features grouped by layer.
    ///
    /// Examples come from a file or, without a file, from the graph's own text.
    pub(crate) fn new(
        features: &BTreeMap<usize, Vec<usize>>,
        transcoders: &Transcoders,
        subject: &LookSubject,
        (ids, texts, count): (&[u32], Option<&TextFile>, usize),
        reporter: &dyn Reporter,
    ) -> Result<Self> {
        let model = subject.model();
        let mut examples: BTreeMap<usize, FeatureExamples> = features
            .iter()
            .map(|(layer, features)| (*layer, FeatureExamples::new(features.clone(), count)))
            .collect();
        let mut add = |text: &[u32]| -> Result<()> {
            let latents = transcoders.latents(&subject.run(text)?)?;
            for (layer, examples) in &mut examples {
                examples.add(text, &latents[*layer])?;
            }
            Ok(())
        };
        match texts {
            None => add(ids)?,
            Some(texts) => {
                let lines = texts.len();
                let bar = reporter.start("collecting examples", lines as u64, Unit::Items("texts"));
                for index in 0..lines {
                    for text in texts.sequences(index, subject.reader())? {
                        add(&text)?;
                    }
                    bar.advance(1);
                }
            }
        }
        let mut meanings = Self { logits: BTreeMap::new(), cards: BTreeMap::new() };
        for (layer, examples) in examples {
            let numbers = &features[&layer];
            let directions = transcoders.layers()[layer].directions(numbers)?;
            let logits = direction_logits(model, &directions, LOGITS)?;
            let named = numbers.iter().zip(&logits);
            meanings.logits.extend(named.map(|(feature, logits)| ((layer, *feature), logits.clone())));
            let collected = CollectedFeatures {
                subject,
                logits: Some(logits),
                tokens: examples.tokens().max(1),
                summaries: examples.finish(),
            };
            meanings.cards.extend(collected.cards().into_iter().map(|card| ((layer, card.index), card)));
        }
        Ok(meanings)
    }

    /// Names a feature by the tokens that it makes most probable: `says ·ball ·cup ·sled`.
    pub(crate) fn name(&self, feature: (usize, usize), reader: &Reader) -> Option<String> {
        let top = self.logits.get(&feature)?.top.iter().take(NAMED);
        Some(top.fold("says".to_owned(), |name, (id, _)| name + " " + &reader.printable(*id)))
    }
}

/// Command that shows more examples of a feature, if `gpt2 look features` can read the transcoders.
pub(crate) fn command(transcoders: &str, layer: usize, feature: usize, input: &str) -> Option<String> {
    let sae = match transcoders {
        BUILT_IN => format!("{BUILT_IN} --site blocks.{layer}.{input}"),
        folder => {
            let folder = std::path::Path::new(folder).join(format!("layer_{layer}"));
            folder.join("cfg.json").is_file().then(|| folder.display().to_string())?
        }
    };
    Some(format!("gpt2 look features --sae {sae} --features {feature} --prompts-file FILE"))
}
