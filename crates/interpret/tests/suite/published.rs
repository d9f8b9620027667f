//! Acceptance tests against published findings about the real GPT-2 124M checkpoint.
//!
//! They require `GPT2_PUBLISHED` to name a folder that contains `gpt2`, and report a skip otherwise. The
//! sources are TransformerLens' tests and its notebooks Main_Demo, Exploratory_Analysis_Demo,
//! Attribution_Patching_Demo and Head_Detector_Demo. Setting `v` or `z` to zero in
//! TransformerLens corresponds to setting it to the constant from [`Processing`]. Prompts start with the
//! end-of-text token by default.

use std::path::PathBuf;

use candle_core::Tensor;
use candle_gpt2::{Gpt2LMHeadModel, LogitsFor, Observer, Site, SiteKind};
use candle_gpt2_interpret::{
    Ablate, Ablation, Chain, Direction, Edit, GridAxis, Head, IgnoredEntries, Metric, Patching,
    PatternSimilarity, PerHead, Place, Processing, Record, Run, TargetPattern, Unit, ablated, attribute,
    center, detect_heads, estimated_grid, head_scores, random_rows,
};
use candle_gpt2_testing::{skipped, values};
use candle_gpt2_weights::{Checkpoint, END_OF_TEXT, LoadOptions, Tokenizer, encode_piece};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Environment variable that names the folder with the published checkpoints.
pub(crate) const PUBLISHED_VARIABLE: &str = "GPT2_PUBLISHED";
/// Tolerance for values published with three decimal places, like most of the values.
const THREE_DIGITS: f64 = 0.002;
const TWO_DIGITS: f64 = 0.006;
const LOSS: f64 = 0.0005;
/// Last position of the indirect object prompts; `SUBJECT` is the second mention of the subject.
const END: usize = 14;
const SUBJECT: usize = 10;

pub(crate) struct Published {
    pub(crate) model: Gpt2LMHeadModel,
    tokenizer: Tokenizer,
}

/// Loads the model if its folder exists; otherwise reports that `what` is skipped.
pub(crate) fn published(what: &str) -> Option<Published> {
    let folder = std::env::var_os(PUBLISHED_VARIABLE).map(|folder| PathBuf::from(folder).join("gpt2"));
    let Some(folder) = folder.filter(|folder| folder.is_dir()) else {
        skipped(&format!("{what}: {PUBLISHED_VARIABLE} does not name a folder with gpt2"));
        return None;
    };
    let checkpoint = Checkpoint::open(folder).unwrap();
    let tokenizer = checkpoint.tokenizer(None).unwrap();
    Some(Published { model: checkpoint.load(&LoadOptions::default(), &|_| ()).unwrap(), tokenizer })
}

impl Published {
    /// Encodes a text without a preceding end-of-text token.
    pub(crate) fn plain(&self, text: &str) -> Vec<u32> {
        encode_piece(&self.tokenizer, text).unwrap()
    }

    pub(crate) fn with_bos(&self, text: &str) -> Vec<u32> {
        [vec![self.id(END_OF_TEXT)], self.plain(text)].concat()
    }

    fn id(&self, word: &str) -> u32 {
        let ids = self.plain(word);
        assert_eq!(ids.len(), 1, "{word:?} is one token of GPT-2");
        ids[0]
    }

    fn run<'a>(&'a self, ids: &'a [u32]) -> Run<'a> {
        Run::new(&self.model, ids).unwrap()
    }

    fn head_site(layer: usize) -> Site {
        Site::in_block(layer, SiteKind::Z)
    }

    /// Contribution of each head to the metric, `[layer · 12 + head]`, and the scale of the final norm.
    ///
    /// The heads are TransformerLens', whose values have no constant part.
    fn heads(
        &self,
        processing: &Processing,
        run: &Run,
        metric: &Metric,
        edit: Option<&mut Edit>,
    ) -> Result<(Vec<f32>, f32)> {
        let scale = Site::outside(SiteKind::LnFinalScale);
        let layers = 0..self.model.config().n_layer;
        let mut record = Record::new(layers.map(Self::head_site).chain([scale]));
        let mut observers: Vec<&mut dyn Observer> = Vec::new();
        observers.extend(edit.map(|edit| edit as &mut dyn Observer));
        observers.push(&mut record);
        run.logits(metric.logits_for(), &mut Chain(observers))?;
        let scale = record.get(scale)?.flatten_all()?.get(metric.position)?.to_scalar::<f32>()?;
        let direction = Direction::new(&self.model, metric.answer, metric.against)?.values.unsqueeze(1)?;
        let mut found = Vec::new();
        for (layer, block) in self.model.transformer().blocks().iter().enumerate() {
            let site = Self::head_site(layer);
            let z = processing.apply(site, record.get(site)?)?.narrow(1, metric.position, 1)?;
            let results = block.attn().results(&z.flatten_from(2)?)?.flatten_to(2)?; // (H, C)
            let of_layer = (center(&results)?.matmul(&direction)? / f64::from(scale))?;
            found.extend(of_layer.flatten_all()?.to_vec1::<f32>()?);
        }
        Ok((found, scale))
    }
}

/// Collects all mismatches before a test fails.
#[derive(Default)]
pub(crate) struct Comparison(pub(crate) Vec<String>);

impl Comparison {
    pub(crate) fn near(&mut self, what: &str, found: impl Into<f64>, expected: f64, tolerance: f64) {
        let found = found.into();
        // NaN is never within the tolerance.
        if (found - expected).abs() <= tolerance {
            return;
        }
        self.0.push(format!("{what}: {found} for {expected}"));
    }

    fn row(&mut self, what: &str, found: &[impl Into<f64> + Copy], expected: &str, tolerance: f64) {
        let expected = numbers(expected);
        assert_eq!(found.len(), expected.len(), "{what}");
        for (place, (found, expected)) in found.iter().zip(expected).enumerate() {
            self.near(&format!("{what}, {place}"), *found, expected, tolerance);
        }
    }

    /// Compares the heads listed in `expected` with a grid.
    fn heads(&mut self, what: &str, found: &[Vec<f32>], expected: &str) {
        for (Head { layer, head }, expected) in by_head(expected) {
            self.near(&format!("{what} of {layer}.{head}"), found[layer][head], expected, THREE_DIGITS);
        }
    }

    /// Checks the published order of the heads that score above 0.3; equal published scores may swap.
    fn order(&mut self, what: &str, found: &PerHead, published: &str) {
        let published = by_head(published);
        let mut above: Vec<(Head, f32)> = found
            .iter()
            .enumerate()
            .flat_map(|(layer, row)| {
                row.iter().enumerate().map(move |(head, score)| (Head { layer, head }, *score))
            })
            .filter(|(_, score)| *score > 0.3)
            .collect();
        above.sort_by(|a, b| b.1.total_cmp(&a.1));
        let score = |head: Head| published.iter().find(|(other, _)| *other == head).map(|(_, score)| *score);
        let ranked: Option<Vec<f64>> = above.iter().map(|(head, _)| score(*head)).collect();
        let count = published.iter().filter(|(_, score)| *score > 0.3).count();
        let is_same = ranked.is_some_and(|ranked| {
            ranked.len() == count
                && ranked.iter().all(|score| *score > 0.3)
                && ranked.is_sorted_by(|a, b| a >= b)
        });
        if !is_same {
            self.0.push(format!("{what}: the heads above .3 are {above:?}"));
        }
    }

    pub(crate) fn finish(self) {
        assert!(
            self.0.is_empty(),
            "{} numbers differ from the published ones:\n{}",
            self.0.len(),
            self.0.join("\n")
        );
    }
}

/// Parses whitespace-separated numbers.
fn numbers(text: &str) -> Vec<f64> {
    text.split_whitespace().map(|number| number.parse().unwrap()).collect()
}

/// Parses heads and their values: `7.3 .135, 7.9 .183`.
fn by_head(text: &str) -> Vec<(Head, f64)> {
    let of = |entry: &str| {
        let (head, number) = entry.trim().split_once(' ')?;
        let (layer, head) = head.split_once('.')?;
        Some((Head { layer: layer.parse().ok()?, head: head.parse().ok()? }, number.parse().ok()?))
    };
    text.split(',').map(|entry| of(entry).unwrap()).collect()
}

/// Centers the logits of one token over the vocabulary, and computes the log probabilities.
fn centered_and_log_probs(logits: &Tensor) -> Result<(Vec<f64>, Vec<f64>)> {
    let logits = values(logits);
    let mean = logits.iter().sum::<f64>() / logits.len() as f64;
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum = logits.iter().map(|logit| (logit - largest).exp()).sum::<f64>().ln() + largest;
    let less = |of: f64| logits.iter().map(|logit| logit - of).collect();
    Ok((less(mean), less(sum)))
}

/// Mean loss over the tokens after the first.
fn loss(run: &Run, observer: &mut dyn Observer) -> Result<f64> {
    let logits = run.logits(LogitsFor::EveryToken, observer)?.squeeze(0)?;
    let mut sum = 0.0;
    for (place, next) in run.ids.iter().enumerate().skip(1) {
        sum -= centered_and_log_probs(&logits.get(place - 1)?)?.1[*next as usize];
    }
    Ok(sum / (run.ids.len() - 1) as f64)
}

#[test]
fn losses_match_published_figures() -> Result<()> {
    let Some(gpt2) = published("losses, and with a head's values at zero") else { return Ok(()) };
    let mut comparison = Comparison::default();
    let about_models = "## Loading Models\n\nHookedTransformer comes loaded with >40 open source GPT-style models. You can load any of \
                        them in with `HookedTransformer.from_pretrained(MODEL_NAME)`. See my explainer for documentation of all supported \
                        models, and this table for hyper-parameters and the name used to load them. Each model is loaded into the \
                        consistent HookedTransformer architecture, designed to be clean, consistent and interpretability-friendly. \n\nFor \
                        this demo notebook we'll look at GPT-2 Small, an 80M parameter model. To try the model the model out, let's find \
                        the loss on this paragraph!";
    for (text, expected, tolerance) in
        [("Hello world!", 5.331_856, LOSS), (about_models, 4.1758, THREE_DIGITS)]
    {
        let found = loss(&gpt2.run(&gpt2.with_bos(text)), &mut Chain(Vec::new()))?;
        comparison.near(&text[..12], found, expected, tolerance);
    }
    let ids = gpt2.with_bos(
        "Natural language processing tasks, such as question answering, machine translation, reading comprehension, and \
         summarization, are typically approached with supervised learning on taskspecific datasets.",
    );
    assert_eq!(ids.len(), 33);
    let run = gpt2.run(&ids);
    comparison.near("the abstract", loss(&run, &mut Chain(Vec::new()))?, 3.999, THREE_DIGITS);
    let site = Site::in_block(0, SiteKind::V);
    let constants = Processing::new(&gpt2.model)?.value_constants(0).unwrap().clone();
    for (what, edit, expected) in [
        ("without v of 0.8, TransformerLens' zero", Ablate::with(site, constants), 5.453),
        ("without v of 0.8, raw zero", Ablate::zero(site)?, 4.117),
    ] {
        comparison.near(what, loss(&run, &mut edit.at(Place::head(8)))?, expected, THREE_DIGITS);
    }
    comparison.finish();
    Ok(())
}

#[test]
fn logits_match_published_figures() -> Result<()> {
    let Some(gpt2) = published("logits less their mean, and the output head's bias") else { return Ok(()) };
    let mut comparison = Comparison::default();
    let last = |ids: &[u32]| -> Result<(Vec<f64>, Vec<f64>)> {
        let logits = gpt2.run(ids).logits(LogitsFor::LastToken, &mut Chain(Vec::new()))?;
        centered_and_log_probs(&logits.flatten_all()?)
    };
    let (logits, log_probs) =
        last(&gpt2.with_bos("After John and Mary went to the store, John gave a bottle of milk to"))?;
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
    let best: Vec<f64> = order[..5].iter().map(|id| logits[*id]).collect();
    comparison.row("the best logits", &best, "18.09 15.38 15.35 15.25 14.84", TWO_DIGITS);
    let best: Vec<f64> = order[..5].iter().map(|id| 100.0 * log_probs[*id].exp()).collect();
    comparison.row("their probabilities in percent", &best, "70.07 4.67 4.54 4.11 2.73", 0.02);
    for (rank, word) in [(0, " Mary"), (2, " John"), (3, " them"), (4, " his")] {
        let found = order.iter().position(|id| *id == gpt2.id(word) as usize).unwrap();
        if found != rank {
            comparison.0.push(format!("the rank of {word:?} is {found}; expected {rank}"));
        }
    }
    for (word, expected) in [(" John", 2.8995), (" Mary", 1.6034)] {
        let bias = Direction::new(&gpt2.model, gpt2.id(word), None)?.bias;
        comparison.near(&format!("bias of {word:?}"), bias, expected, THREE_DIGITS);
    }
    let ids = gpt2.plain("hi how are you");
    let expected =
        ["5.9978 6.2685 3.3547", "7.1920 6.1621 .3314", "5.5006 4.7137 .9853", "10.5213 8.5669 2.3738"];
    assert_eq!(ids.len(), expected.len());
    for (place, expected) in expected.into_iter().enumerate() {
        let (logits, _) = last(&ids[..=place])?;
        comparison.row(&format!("token {place}"), &logits[..3], expected, THREE_DIGITS);
    }
    comparison.finish();
    Ok(())
}

/// Eight indirect object prompts of 15 tokens; the two prompts of a pair differ in the giver.
struct IndirectObjects {
    prompts: Vec<Vec<u32>>,
    metrics: Vec<Metric>,
}

impl IndirectObjects {
    fn new(gpt2: &Published) -> Self {
        let (mut prompts, mut metrics) = (Vec::new(), Vec::new());
        for (before, after, first, second) in [
            ("When John and Mary went to the shops,", " gave the bag to", " Mary", " John"),
            ("When Tom and James went to the park,", " gave the ball to", " Tom", " James"),
            ("When Dan and Sid went to the shops,", " gave an apple to", " Dan", " Sid"),
            ("After Martin and Amy went to the park,", " gave a drink to", " Martin", " Amy"),
        ] {
            for (answer, subject) in [(first, second), (second, first)] {
                let ids = gpt2.with_bos(&format!("{before}{subject}{after}"));
                assert_eq!(ids.len(), END + 1, "{before}");
                assert_eq!(ids[SUBJECT], gpt2.id(subject), "{before}");
                prompts.push(ids);
                metrics.push(Metric::logit_difference(gpt2.id(answer), gpt2.id(subject), END));
            }
        }
        Self { prompts, metrics }
    }

    /// Mean over the prompts.
    fn mean(&self, of: impl Fn(usize) -> Result<Vec<f32>>) -> Result<Vec<f32>> {
        let mut sum: Vec<f32> = Vec::new();
        for index in 0..self.prompts.len() {
            let values = of(index)?;
            sum.resize(values.len(), 0.0);
            sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += value / self.prompts.len() as f32);
        }
        Ok(sum)
    }

    /// Mean effects as fractions of the mean difference, `[layer][place]`.
    ///
    /// Each prompt serves once as the clean one, with the other of its pair as the corrupted one.
    fn shares(
        &self,
        gpt2: &Published,
        of: impl Fn(&Patching) -> Result<Vec<Vec<f32>>>,
    ) -> Result<Vec<Vec<f32>>> {
        let (mut sum, mut range): (Vec<Vec<f32>>, f32) = (Vec::new(), 0.0);
        for (index, ids) in self.prompts.iter().enumerate() {
            let patching =
                Patching::new(gpt2.run(ids), gpt2.run(&self.prompts[index ^ 1]), self.metrics[index])?;
            let of_prompt = patching.clean_value - patching.corrupted_value;
            let grid = of(&patching)?;
            sum.resize(grid.len(), Vec::new());
            for (sum, row) in sum.iter_mut().zip(grid) {
                sum.resize(row.len(), 0.0);
                sum.iter_mut().zip(row).for_each(|(sum, share)| *sum += share * of_prompt);
            }
            range += of_prompt;
        }
        sum.iter_mut().flatten().for_each(|value| *value /= range);
        Ok(sum)
    }

    fn patched(&self, gpt2: &Published, kind: SiteKind, by: GridAxis) -> Result<Vec<Vec<f32>>> {
        self.shares(gpt2, |patching| Ok(patching.grid(kind, by, &|| ())?.values))
    }
}

#[test]
fn ioi_attribution_matches_published_figures() -> Result<()> {
    let Some(gpt2) = published("logit attribution of indirect objects") else { return Ok(()) };
    let (set, mut comparison) = (IndirectObjects::new(&gpt2), Comparison::default());
    let processing = Processing::new(&gpt2.model)?;
    let run = |index: usize| gpt2.run(&set.prompts[index]);
    let mut differences = Vec::new();
    for (index, metric) in set.metrics.iter().enumerate() {
        differences.push(metric.of_run(&run(index), &mut Chain(Vec::new()))?);
    }
    comparison.row(
        "logit differences",
        &differences,
        "3.337 3.202 2.709 3.797 1.720 5.281 2.601 5.767",
        THREE_DIGITS,
    );
    comparison.near("their mean", differences.iter().sum::<f32>() / 8.0, 3.5519, THREE_DIGITS);
    let corrupted =
        set.mean(|index| Ok(vec![set.metrics[index].of_run(&run(index ^ 1), &mut Chain(Vec::new()))?]))?;
    comparison.near("the corrupted mean", corrupted[0], -3.5519, THREE_DIGITS);
    let of_unit = |unit| set.mean(|index| Ok(attribute(&run(index), &set.metrics[index], unit)?.values));
    comparison.row(
        "accumulated",
        &of_unit(Unit::Layer)?,
        "0 -.007 -.008 -.009 -.009 -.009 -.006 -.008 -.010 -.015 -.014 -.020 -.009 -.027 -.030 .250 .251 .450 .460 5.025 5.143 \
         4.731 4.887 3.445 3.552",
        THREE_DIGITS,
    );
    comparison.row(
        "components",
        &of_unit(Unit::Component)?,
        "0 0 -.007 -.001 -.002 0 0 .002 -.001 -.002 -.005 .001 -.006 .011 -.018 -.003 .280 .001 .199 .010 4.565 .117 -.412 .156 \
         -1.442 .106",
        THREE_DIGITS,
    );

    let (mut clean, mut scales) = (Vec::new(), Vec::new());
    for (index, metric) in set.metrics.iter().enumerate() {
        let mut heads = attribute(&run(index), metric, Unit::TransformerLensHead)?;
        assert_eq!(heads.labels.pop().as_deref(), Some("remainder"));
        heads.values.truncate(heads.labels.len());
        clean.push(heads.values);
        scales.push(gpt2.heads(&processing, &run(index), metric, None)?.1);
    }
    comparison.row(
        "scales of the final norm",
        &scales,
        "19.57 18.35 18.29 18.68 17.49 18.87 16.42 18.68",
        TWO_DIGITS,
    );
    let heads = set.mean(|index| Ok(clean[index].clone()))?;
    let heads: Vec<Vec<f32>> = heads.chunks(12).map(<[f32]>::to_vec).collect();
    let early = "7.3 .135, 7.9 .183, 8.6 -.083, 8.10 .290";
    comparison.heads("heads", &heads, early);
    for (layer, row) in heads[..9].iter().enumerate() {
        for (head, value) in row.iter().enumerate() {
            if by_head(early).iter().all(|(other, _)| *other != Head { layer, head }) {
                comparison.near(&format!("{layer}.{head}, small"), *value, 0.0, 0.08);
            }
        }
    }
    for (layer, expected) in [
        (9, ".086 -.001 .068 .013 -.021 .051 1.384 .046 -.038 2.985 .002 -.008"),
        (10, ".561 .171 -.034 .058 -.002 .002 .288 -1.899 -.002 -.035 .480 -.001"),
        (11, ".016 -.040 -.388 .011 -.005 -.003 -.081 .008 .043 -.040 -.970 .012"),
    ] {
        comparison.row(&format!("heads of layer {layer}"), &heads[layer], expected, THREE_DIGITS);
    }

    // With the strongest name mover ablated at the last position, backup heads take over.
    let name_mover = Head { layer: 9, head: 9 };
    let site = Published::head_site(name_mover.layer);
    let constants = processing.value_constants(name_mover.layer).unwrap();
    let place = Place { positions: Some(vec![END]), ..Place::head(name_mover.head) };
    let without = set.mean(|index| {
        let metric = &set.metrics[index];
        let (logits, has_changed) =
            ablated(&run(index), &[name_mover], Some(END), &Ablation::TransformerLensZero)?;
        assert!(has_changed);
        let difference = metric.of(&logits.narrow(1, END, 1)?)?.squeeze(0)?.to_scalar()?;
        let mut edit = Ablate::with(site, constants.clone()).at(place.clone());
        let (heads, scale) = gpt2.heads(&processing, &run(index), metric, Some(&mut edit))?;
        Ok([vec![difference, scales[index] / scale], heads].concat())
    })?;
    comparison.near("without 9.9", without[0], 2.92, TWO_DIGITS);
    comparison.near("ratio of the scales without 9.9", without[1], 1.042, THREE_DIGITS);
    let heads: Vec<Vec<f32>> = without[2..].chunks(12).map(<[f32]>::to_vec).collect();
    let expected = "10.7 -.711, 10.10 1.229, 10.0 .860, 9.6 1.441, 10.1 .326, 10.2 .163, 11.10 -1.135, 11.2 -.501, 9.9 0";
    comparison.heads("heads without 9.9", &heads, expected);

    let first: Vec<Vec<f32>> = clean[0].chunks(12).map(<[f32]>::to_vec).collect();
    let expected = "9.9 1.9583, 9.6 1.6281, 10.7 -1.4267, 11.1 -.9117, 11.10 -.9042, 10.0 .6370, 10.10 .4524, 8.10 .4264";
    comparison.heads("heads of the first prompt", &first, expected);
    for (word, neuron, expected) in
        [(" Mary", "L11N611", 0.3188), (" John", "L11N621", -0.4359), (" the", "L10N2214", 0.4369)]
    {
        let metric = Metric { answer: gpt2.id(word), against: None, ..set.metrics[0] };
        let found = attribute(&run(0), &metric, Unit::Neuron)?;
        let neurons = || found.labels.iter().zip(&found.values).filter(|(label, _)| *label != "remainder");
        let (label, value) = neurons().max_by(|a, b| a.1.abs().total_cmp(&b.1.abs())).unwrap();
        assert_eq!(neurons().count(), 36_864);
        comparison.near(&format!("neuron {label} for {word:?}, the largest"), *value, expected, THREE_DIGITS);
        if label != neuron {
            comparison.0.push(format!("the largest neuron for {word:?} is {label}; expected {neuron}"));
        }
    }
    comparison.finish();
    Ok(())
}

#[test]
fn ioi_patching_matches_published_figures() -> Result<()> {
    let Some(gpt2) = published("patching of indirect objects") else { return Ok(()) };
    let (set, mut comparison) = (IndirectObjects::new(&gpt2), Comparison::default());
    let at = |grid: &[Vec<f32>], position: usize, layers: &[usize]| -> Vec<f32> {
        layers.iter().map(|layer| grid[*layer][position]).collect()
    };
    let grid = set.patched(&gpt2, SiteKind::ResidPre, GridAxis::Position)?;
    let all: Vec<usize> = (0..12).collect();
    let expected = "1.0 1.001 1.001 1.000 .995 .968 .968 .923 .657 .027 -.027 -.006";
    comparison.row("residual stream at the subject", &at(&grid, SUBJECT, &all), expected, THREE_DIGITS);
    let expected = ".017 .319 .938 1.005 .991";
    comparison.row("residual stream at the end", &at(&grid, END, &all[7..]), expected, THREE_DIGITS);
    for position in 0..SUBJECT {
        let what = format!("residual stream at {position}");
        comparison.row(&what, &at(&grid, position, &all), "0 0 0 0 0 0 0 0 0 0 0 0", 0.0005);
    }
    let grid = set.patched(&gpt2, SiteKind::AttnOut, GridAxis::Position)?;
    let expected = ".035 .155 .352 .120";
    comparison.row("attention at the subject", &at(&grid, SUBJECT, &[0, 3, 5, 6]), expected, THREE_DIGITS);
    let expected = ".298 .570 .272 -.193 -.406";
    comparison.row("attention at the end", &at(&grid, END, &all[7..]), expected, THREE_DIGITS);
    let grid = set.patched(&gpt2, SiteKind::MlpOut, GridAxis::Position)?;
    comparison.row("MLPs at the subject", &at(&grid, SUBJECT, &[0, 5]), ".851 .097", THREE_DIGITS);
    for (what, kind, expected) in [
        (
            "z",
            SiteKind::Z,
            "3.0 .11626, 5.5 .343, 6.0 .040, 6.9 .130, 7.3 .124, 7.9 .192, 8.6 .319, 8.10 .278, 9.6 -.048, 9.7 .058, 9.9 .264, \
             10.0 .084, 10.6 .048, 10.7 -.480, 10.10 .061, 11.2 -.114, 11.10 -.278, 0.0 .00095, 0.1 .01612",
        ),
        ("v", SiteKind::V, "7.3 .133, 7.9 .208, 8.6 .317, 8.10 .273, 9.7 .069, 6.0 .049"),
        (
            "pattern",
            SiteKind::Pattern,
            "3.0 .115, 5.5 .344, 6.9 .130, 9.9 .277, 10.0 .095, 10.7 -.505, 10.10 .069, 11.2 -.078, 11.10 -.320",
        ),
    ] {
        comparison.heads(what, &set.patched(&gpt2, kind, GridAxis::Head)?, expected);
    }
    comparison.finish();
    Ok(())
}

#[test]
fn patching_of_one_pair_matches_published_figures() -> Result<()> {
    let Some(gpt2) = published("patching of one pair, with and without a first token") else { return Ok(()) };
    let mut comparison = Comparison::default();
    let text = |name: &str| format!("After John and Mary went to the store, {name} gave a bottle of milk to");
    for (has_bos, clean_value, corrupted_value) in [(true, 4.276, -2.738), (false, 4.124, -2.272)] {
        let ids = |name: &str| if has_bos { gpt2.with_bos(&text(name)) } else { gpt2.plain(&text(name)) };
        let (clean, corrupted) = (ids("Mary"), ids("John"));
        assert_eq!(clean.len(), if has_bos { 17 } else { 16 });
        let metric = Metric::logit_difference(gpt2.id(" John"), gpt2.id(" Mary"), clean.len() - 1);
        let patching = Patching::new(gpt2.run(&clean), gpt2.run(&corrupted), metric)?;
        comparison.near("clean", patching.clean_value, clean_value, THREE_DIGITS);
        comparison.near("corrupted", patching.corrupted_value, corrupted_value, THREE_DIGITS);
        if !has_bos {
            let grid = patching.grid(SiteKind::ResidPost, GridAxis::Position, &|| ())?.values;
            comparison.near("after the first block, at the subject", grid[0][9], 0.99747, THREE_DIGITS);
            continue;
        }
        let grid = patching.grid(SiteKind::ResidPre, GridAxis::Position, &|| ())?.values;
        let at = |position: usize| grid.iter().map(|row| row[position]).collect::<Vec<f32>>();
        let expected = "1.0 .9981 .9981 .9967 .9906 .9617 .9631 .9359 .7702 .0965 -.0233 -.0086";
        comparison.row("at the subject", &at(10), expected, THREE_DIGITS);
        comparison.row("at the end", &at(16)[7..], ".0187 .4499 .8995 .9613 .9496", THREE_DIGITS);
    }
    comparison.finish();
    Ok(())
}

#[test]
fn ioi_attribution_patching_matches_published_figures() -> Result<()> {
    let Some(gpt2) = published("attribution patching of indirect objects") else { return Ok(()) };
    let (set, mut comparison) = (IndirectObjects::new(&gpt2), Comparison::default());
    let estimated = |kind, by| set.shares(&gpt2, |patching| Ok(estimated_grid(patching, kind, by)?));
    comparison.heads(
        "z",
        &estimated(SiteKind::Z, GridAxis::Head)?,
        "3.0 .0894, 5.5 .2823, 6.0 .0332, 6.9 .1081, 7.3 .1120, 7.9 .1731, 8.6 .3593, 8.10 .2729, 9.7 .0556, 9.9 .3768, \
         10.0 .0903, 10.7 -.4033, 10.10 .0657, 11.2 -.1139, 11.10 -.2813",
    );
    // Activation patching gives values near 1 in both cases.
    let grid = estimated(SiteKind::ResidPre, GridAxis::Position)?;
    comparison.near("residual stream at the start", grid[0][SUBJECT], -0.0247, THREE_DIGITS);
    comparison.near("residual stream before block 6", grid[6][SUBJECT], 0.5881, THREE_DIGITS);
    comparison.finish();
    Ok(())
}

#[test]
fn head_scores_on_repeated_tokens_match_published_figures() -> Result<()> {
    let Some(gpt2) = published("scores of heads") else { return Ok(()) };
    let mut comparison = Comparison::default();
    let scores = head_scores(&gpt2.model, &random_rows(0, 2, 100, 100, 20_000), None)?;
    let duplicate = "0.5 .703, 3.0 .678, 0.1 .132";
    for (what, found, expected) in [
        (
            "induction",
            &scores.induction,
            "5.0 .434, 5.1 .931, 5.5 .926, 6.9 .926, 7.1 .189, 7.2 .851, 7.10 .904, 8.1 .379, 8.6 .119, 9.0 .240, 9.1 .144, \
             9.6 .444, 9.9 .473, 10.0 .361, 10.1 .482, 10.3 .126, 10.6 .288, 10.7 .390, 10.10 .166, 10.11 .222, 11.9 .274, \
             11.10 .380",
        ),
        (
            "previous",
            &scores.previous,
            "4.11 .992, 3.7 .529, 6.8 .499, 2.2 .482, 3.2 .419, 5.6 .418, 2.9 .361, 3.8 .342, 3.6 .331, 2.5 .330, 3.3 .301, \
             2.3 .299",
        ),
        ("duplicate", &scores.duplicate, duplicate),
    ] {
        comparison.heads(what, found, expected);
        comparison.order(what, found, expected);
    }
    for (layer, row) in scores.duplicate.iter().enumerate() {
        for (head, score) in row.iter().enumerate() {
            if by_head(duplicate).iter().all(|(other, _)| *other != Head { layer, head }) && *score > 0.043 {
                comparison
                    .0
                    .push(format!("duplicate of {layer}.{head}: {score}; published values are at most .041"));
            }
        }
    }
    let ids = gpt2.with_bos(
        "The head detector feature for TransformerLens allows users to check for various common heads automatically, reducing \
         the cost of discovery.",
    );
    for (is_excluded, expected) in [
        (false, "4.11 .9594, 2.2 .5738, 3.7 .4644, 2.9 .3567"),
        (true, "4.11 1.0000, 5.6 .8786, 3.3 .7983, 2.2 .7370, 3.7 .7246, 7.0 .6497, 0.3 .6219"),
    ] {
        let excluded = IgnoredEntries { bos: is_excluded, current: is_excluded };
        let found =
            detect_heads(&gpt2.run(&ids), &TargetPattern::Previous, PatternSimilarity::Share, excluded)?;
        comparison.heads("previous token on a text", &found, expected);
    }
    comparison.finish();
    Ok(())
}

#[test]
fn random_rows_match_pytorch() {
    let rows = random_rows(0, 2, 100, 100, 20_000);
    assert_eq!(rows.iter().map(Vec::len).collect::<Vec<_>>(), [100, 100]);
    assert_eq!(rows[0][..8], [1044, 3539, 10733, 15360, 18263, 5279, 15527, 4603]);
    assert_eq!(rows[1][..4], [3005, 5346, 5456, 15715]);
    assert_eq!(rows.iter().flatten().sum::<u32>(), 2_017_707);
}
