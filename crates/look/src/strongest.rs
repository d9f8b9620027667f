//! Strongest transcoder features at each token of a text, and details of one feature.

use candle_core::{DType, Device};
use candle_gpt2::Gpt2LMHeadModel;
use candle_gpt2_interpret::{Dictionary, Histogram, Processing, Record, feature_logits};
use candle_gpt2_pictures::{
    Axis, FeatureCard, FeatureHistogram, FeatureQuantile, FeatureText, Report, Scale,
};

use crate::Reader;
use crate::error::Result;
use crate::features::LOGITS;

/// Lists the `top` strongest features of the given layers at each token.
///
/// The report has a row for each layer and rank, with the strongest features in a layer's last row. The text
/// of a cell is the feature's number and the token that it makes most probable. A cell without an active
/// feature is empty.
///
/// `record` must have the hook point of each layer's dictionary. `name` is the model's display name.
///
/// # Errors
/// If the record lacks a hook point, or memory for the output head in f32 runs out.
///
/// ```
/// use candle_gpt2_engine::{ModelOptions, Silent};
/// use candle_gpt2_interpret::Run;
/// use candle_gpt2_look::{Reader, built_in_dictionaries, strongest_features};
///
/// let model = ModelOptions::default().open(&Silent)?.load(&Silent)?;
/// let dictionaries = built_in_dictionaries()?;
/// let layers = [(2, &dictionaries[2]), (5, &dictionaries[5])];
/// let ids = model.vocabulary().encode("One day, Mia was")?;
/// let record = Run::new(model.model(), &ids)?.record(layers.map(|(_, dictionary)| dictionary.config().site))?;
/// let reader = Reader::without_bos(model.vocabulary());
/// let report = strongest_features(&record, &ids, &layers, 3, model.model(), "built-in", &reader)?;
/// assert_eq!(report.axes[0].labels[..4], ["2, 3rd", "2, 2nd", "2, 1st", "5, 3rd"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn strongest_features(
    record: &Record,
    ids: &[u32],
    layers: &[(usize, &Dictionary)],
    top: usize,
    model: &Gpt2LMHeadModel,
    name: &str,
    reader: &Reader,
) -> Result<Report> {
    let processing = Processing::new(model)?;
    let mut report = reader.report("features", "the strongest features of each token".into(), name, ids);
    let (mut labels, mut active) = (Vec::new(), 0);
    for (layer, dictionary) in layers {
        let dictionary = &dictionary.to_device(model.device())?;
        let strongest: Vec<Vec<(usize, f32)>> = latents(record, dictionary, &processing)?
            .iter()
            .map(|row| {
                let mut order: Vec<usize> = (0..row.len()).filter(|feature| row[*feature] > 0.0).collect();
                active += order.len();
                order.sort_by(|a, b| row[*b].total_cmp(&row[*a]).then(a.cmp(b)));
                order.into_iter().take(top).map(|feature| (feature, row[feature])).collect()
            })
            .collect();
        let mut features: Vec<usize> = strongest.iter().flatten().map(|(feature, _)| *feature).collect();
        features.sort_unstable();
        features.dedup();
        let logits = feature_logits(model, dictionary, &features, 1)?;
        let text = |feature: usize| {
            let place = features.binary_search(&feature).ok();
            let most = place.zip(logits.as_ref()).and_then(|(place, logits)| logits[place].top.first());
            let token = most.map_or(String::new(), |(id, _)| reader.printable(*id));
            format!("{feature} {token}")
        };
        // Pictures have the first layer at the bottom, and a layer's strongest features in its top row.
        for place in (0..top.min(dictionary.latents())).rev() {
            labels.push(format!("{layer}, {}", ordinal(place + 1)));
            let cells = strongest.iter().map(|row| row.get(place));
            report.values.extend(cells.clone().map(|cell| cell.map(|(_, value)| *value)));
            report.texts.extend(cells.map(|cell| cell.map_or(String::new(), |(feature, _)| text(*feature))));
        }
    }
    report.axes = vec![Axis::new("layer", labels), Axis::tokens("token", &report.tokens)];
    report.scale = Scale::Amount;
    let cells = (ids.len() * layers.len()) as f64;
    report
        .notes
        .push(format!("on average, {:.1} features per layer are active at a token", active as f64 / cells));
    report.notes.push("cell text: the feature's index, and the token that it promotes most".into());
    Ok(report)
}

/// Describes a feature in a text, such as one of [`strongest_features`].
///
/// The card has the activation at each token, and the tokens that the feature makes more and less probable.
/// `record` must have the dictionary's hook point.
///
/// # Errors
/// If the feature does not exist, the record lacks the hook point, or memory for the output head in f32 runs
/// out.
pub fn feature_in_text(
    record: &Record,
    ids: &[u32],
    (dictionary, feature): (&Dictionary, usize),
    model: &Gpt2LMHeadModel,
    reader: &Reader,
) -> Result<FeatureCard> {
    let dictionary = &dictionary.to_device(model.device())?;
    let logits = feature_logits(model, dictionary, &[feature], LOGITS)?;
    let rows = latents(record, dictionary, &Processing::new(model)?)?;
    let activations: Vec<f32> = rows.iter().map(|row| row[feature]).collect();
    let mut histogram = Histogram::default();
    let active: Vec<f32> = activations.iter().copied().filter(|value| *value > 0.0).collect();
    active.iter().for_each(|value| histogram.add(*value));
    let least = active.iter().copied().reduce(f32::min).unwrap_or(0.0);
    let largest = active.iter().copied().fold(0.0, f32::max);
    let tokens = |found: &[(u32, f32)]| found.iter().map(|(id, _)| reader.token_text(*id)).collect();
    let logits = logits.and_then(|logits| logits.into_iter().next());
    let text = FeatureText {
        tokens: ids.iter().map(|id| reader.token_text(*id)).collect(),
        train_token_ind: activations.iter().position(|value| *value == largest).unwrap_or(0),
        tokens_acts_list: activations,
        is_repeated_datapoint: false,
    };
    Ok(FeatureCard {
        index: feature,
        density: active.len() as f32 / ids.len() as f32,
        act_min: least,
        act_max: largest,
        histogram: FeatureHistogram { bin_width: histogram.width, counts: histogram.counts().to_vec() },
        top_logits: logits.as_ref().map(|logits| tokens(&logits.top)).unwrap_or_default(),
        bottom_logits: logits.as_ref().map(|logits| tokens(&logits.bottom)).unwrap_or_default(),
        examples_quantiles: vec![FeatureQuantile {
            quantile_name: "In this text".into(),
            examples: vec![text],
        }],
    })
}

/// Latents of each token, `(T, F)`.
fn latents(record: &Record, dictionary: &Dictionary, processing: &Processing) -> Result<Vec<Vec<f32>>> {
    let input = dictionary.input(record.get(dictionary.config().site)?, processing)?;
    let latents = dictionary.encode(&input)?.flatten_to(1)?; // (T, F)
    Ok(latents.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.to_vec2()?)
}

/// Formats an ordinal: `1st`, `2nd`, `3rd`, `4th`.
fn ordinal(number: usize) -> String {
    let ending = match (number % 100, number % 10) {
        (11..=13, _) => "th",
        (_, 1) => "st",
        (_, 2) => "nd",
        (_, 3) => "rd",
        _ => "th",
    };
    format!("{number}{ending}")
}
