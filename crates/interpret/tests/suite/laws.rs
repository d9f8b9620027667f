//! Properties that hold for every model, regardless of its weights.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Tensor};
use candle_gpt2::{Gpt2Config, LogitsFor, Observer, Pass, Site, SiteKind};
use candle_gpt2_interpret::{
    Ablate, Ablation, Add, Chain, ControlVector, Dictionary, DictionaryConfig, Edit, GridAxis,
    InterpretError, LensOptions, Measure, Metric, Patching, Place, Receiver, Record, Replace, Run, Saliency,
    Splice, Steering, estimated_grid, gradients_under, lens_cells, logit_lens, random_rows, record_rows,
    residual_sites, site_gradients, site_width, token_rows, token_weights,
};
use candle_gpt2_kernels::{Interrupt, interruptible};
use candle_gpt2_testing::{assert_close, pattern, values};

use crate::common::Case;
use crate::graphs::{seeded, small};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Tolerance for f32 sums computed in a different order.
const SAME: f64 = 2e-5;

/// Observer that requests these hook points and changes nothing.
struct PassiveObserver(Vec<Site>);

impl Observer for PassiveObserver {
    fn wants(&self, site: Site) -> bool {
        self.0.contains(&site)
    }

    fn observe(&mut self, _: Site, value: Tensor) -> candle_core::Result<Tensor> {
        Ok(value)
    }
}

fn logits(run: &Run, observer: &mut dyn Observer) -> Result<Vec<f64>> {
    Ok(values(&run.logits(LogitsFor::EveryToken, observer)?))
}

#[test]
fn observing_does_not_change_the_logits() -> Result<()> {
    for case in Case::all() {
        let run = case.clean();
        let plain = values(&case.model.forward_with(
            &run.input()?,
            LogitsFor::EveryToken,
            None,
            &mut Pass::inference(),
        )?);
        assert_eq!(
            logits(&run, &mut PassiveObserver(Vec::new()))?,
            plain,
            "an observer that requests nothing"
        );
        let all = Site::all(case.layers());
        let seen = logits(&run, &mut PassiveObserver(all.clone()))?;
        let mut record = Record::new(all.iter().copied());
        assert_eq!(logits(&run, &mut record)?, seen, "recording and returning the value unchanged");
        // Observing one hook point does not affect the rest of the computation.
        for site in all {
            let one = logits(&run, &mut PassiveObserver(vec![site]))?;
            for (one, plain) in one.iter().zip(&plain) {
                assert!((one - plain).abs() < SAME * plain.abs().max(1.0), "{site}: {one} for {plain}");
            }
        }
    }
    Ok(())
}

#[test]
fn replacing_activations_with_themselves_changes_nothing() -> Result<()> {
    for case in Case::all() {
        let run = case.clean();
        let all = Site::all(case.layers());
        let mut record = Record::new(all.iter().copied());
        let seen = logits(&run, &mut record)?;
        let mut edits: Vec<_> =
            record.values.iter().map(|(site, value)| Replace::new(*site, value.clone())).collect();
        let mut chain = Chain(edits.iter_mut().map(|edit| edit as &mut dyn Observer).collect());
        assert_eq!(logits(&run, &mut chain)?, seen, "{}", case.name);
        assert!(edits.iter().all(|edit| !edit.has_changed), "an edit without effect reports no change");
        // An edit at any hook point reaches the logits.
        for site in all {
            let mut add = Add::new(site, Tensor::new(&[0.5f32], &Device::Cpu)?);
            let changed = logits(&run, &mut add)?;
            // A constant added to all scores of a query cancels in the softmax.
            let is_shift = matches!(site.kind, SiteKind::AttnScores);
            assert!(add.has_changed, "{site}");
            assert!(is_shift || changed != seen, "{}: {site} has no effect", case.name);
        }
    }
    Ok(())
}

#[test]
fn residual_stream_is_the_sum_of_its_parts() -> Result<()> {
    for case in Case::all() {
        let record = case.clean().record(Site::all(case.layers()))?;
        let of = |layer, kind| record.get(Site::in_block(layer, kind));
        let embeddings =
            (record.get(Site::outside(SiteKind::Embed))? + record.get(Site::outside(SiteKind::PosEmbed))?)?;
        assert_close(of(0, SiteKind::ResidPre)?, &embeddings, SAME, "embeddings");
        for (layer, block) in case.model.transformer().blocks().iter().enumerate() {
            let results = of(layer, SiteKind::Result)?
                .sum(2)?
                .broadcast_add(block.attn().out_proj().bias().unwrap())?;
            assert_close(&results, of(layer, SiteKind::AttnOut)?, SAME, "results and bias");
            let mid = (of(layer, SiteKind::ResidPre)? + of(layer, SiteKind::AttnOut)?)?;
            assert_close(&mid, of(layer, SiteKind::ResidMid)?, SAME, "the middle");
            let post = (of(layer, SiteKind::ResidMid)? + of(layer, SiteKind::MlpOut)?)?;
            assert_close(&post, of(layer, SiteKind::ResidPost)?, SAME, "the end");
            let sums = of(layer, SiteKind::Pattern)?.sum(3)?;
            assert_close(&sums, &sums.ones_like()?, SAME, "attention adds up to 1");
            if layer > 0 {
                assert_eq!(
                    values(of(layer, SiteKind::ResidPre)?),
                    values(of(layer - 1, SiteKind::ResidPost)?),
                    "a block's input is the previous block's output"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn run_can_start_at_any_block() -> Result<()> {
    for case in Case::all() {
        let run = case.clean();
        let whole =
            case.model.forward_with(&run.input()?, LogitsFor::LastToken, None, &mut Pass::inference())?;
        for (layer, residual) in run.residuals()?.into_iter().enumerate() {
            let pass = &mut Pass::inference();
            let from = case.model.forward_from(layer, residual, LogitsFor::LastToken, pass)?;
            assert_eq!(values(&from), values(&whole), "{}: from block {layer}", case.name);
        }
        let pass = &mut Pass::inference();
        let x = run.residuals()?.remove(0);
        let error = case.model.forward_from(case.layers() + 1, x, LogitsFor::LastToken, pass).unwrap_err();
        assert!(error.to_string().contains("is out of range; the model has"), "{error}");
    }
    Ok(())
}

/// Collects the layers of the requested hook points.
#[derive(Default)]
struct RequestedLayers(Mutex<BTreeSet<Option<usize>>>);

impl Observer for RequestedLayers {
    fn wants(&self, site: Site) -> bool {
        self.0.lock().unwrap().insert(site.layer);
        false
    }

    fn observe(&mut self, _: Site, value: Tensor) -> candle_core::Result<Tensor> {
        Ok(value)
    }
}

#[test]
fn stopped_pass_computes_no_later_block() -> Result<()> {
    for case in Case::all() {
        let (run, residuals) = (case.clean(), case.clean().residuals()?);
        for (layer, residual) in residuals.iter().enumerate() {
            let mut requested = RequestedLayers::default();
            let mut pass = Pass::inference().observed_by(&mut requested).stopping_at(layer);
            let x = case.model.transformer().forward_with(&run.input()?, None, &mut pass)?;
            assert_eq!(values(&x), values(residual), "{}: to block {layer}", case.name);
            let requested = requested.0.into_inner()?;
            let most = requested.iter().copied().max().flatten().unwrap();
            assert!(
                most <= layer && (layer == 0 || requested.contains(&Some(layer - 1))),
                "{requested:?} of {layer}"
            );
        }
        let mut pass = Pass::inference().stopping_at(case.layers() + 1);
        let error =
            case.model.forward_with(&run.input()?, LogitsFor::LastToken, None, &mut pass).unwrap_err();
        assert!(error.to_string().contains("is out of range; the model has"), "{error}");
    }
    Ok(())
}

/// Checks that a sequence can be run in chunks with a cache if every pass stops at the same block.
///
/// Passes that stop at another block would miss tokens and are rejected.
#[test]
fn passes_over_a_cache_stop_at_the_same_block() -> Result<()> {
    for case in Case::all() {
        let (model, ids) = (case.model.transformer(), &case.clean);
        let residuals = case.clean().residuals()?;
        for (layer, residual) in residuals.iter().enumerate().skip(1) {
            let mut cache = case.model.new_cache(1, ids.len())?;
            let mut read = |part: &[u32], stop: usize| {
                let part = Tensor::from_slice(part, (1, part.len()), &Device::Cpu)?;
                model.forward_with(&part, Some(&mut cache), &mut Pass::inference().stopping_at(stop))
            };
            let mut parts = vec![read(&ids[..2], layer)?];
            for other in (0..=case.layers()).filter(|other| *other != layer) {
                let error = read(&ids[2..], other).expect_err("another block").to_string();
                assert!(error.contains("stop at the same block"), "{error}");
            }
            parts.extend([read(&ids[2..3], layer)?, read(&ids[3..], layer)?]);
            let what = format!("{}: to block {layer}", case.name);
            assert_close(&Tensor::cat(&parts, 1)?, residual, SAME, &what);
        }
    }
    Ok(())
}

#[test]
fn record_does_not_depend_on_stopping_early() -> Result<()> {
    for case in Case::all() {
        let run = case.clean();
        // Counts the interrupt checks, at least one per block.
        let requested = |sites: &[Site]| -> Result<(Record, u64)> {
            let count = Arc::new(AtomicU64::new(0));
            let counted = Arc::clone(&count);
            let interrupt: Interrupt = Arc::new(move || {
                counted.fetch_add(1, Ordering::Relaxed);
                false
            });
            let record = interruptible(interrupt, || run.record(sites.iter().copied()))?;
            Ok((record, count.load(Ordering::Relaxed)))
        };
        for site in Site::all(case.layers()) {
            let mut whole = Record::new([site]);
            run.logits(LogitsFor::EveryToken, &mut whole)?;
            let (stopped, _) = requested(&[site])?;
            assert_eq!(values(stopped.get(site)?), values(whole.get(site)?), "{}: {site}", case.name);
        }
        let steps: Vec<u64> =
            residual_sites(case.layers()).map(|site| Ok(requested(&[site])?.1)).collect::<Result<_>>()?;
        assert!(steps.is_sorted_by(|before, after| before < after), "{}: {steps:?}", case.name);
    }
    Ok(())
}

/// Checks that sequences of several lengths are bit-identical in a batch and alone.
#[test]
fn rows_recorded_in_a_batch_equal_rows_recorded_alone() -> Result<()> {
    for case in Case::all() {
        let config = case.model.config();
        let texts = [&case.clean[..], &case.clean[..1], &case.corrupted[..]];
        let sites: Vec<Site> =
            Site::all(case.layers()).into_iter().filter(|site| site_width(*site, config).is_some()).collect();
        for sites in [&sites[..], &sites[..4]] {
            let batched = record_rows(&case.model, &texts, sites.iter().copied())?;
            for site in sites {
                let rows = token_rows(*site, batched.get(*site)?)?;
                assert_eq!(rows.dim(1)?, site_width(*site, config).unwrap(), "{site}");
                let mut first = 0;
                for ids in texts {
                    let alone = Run::new(&case.model, ids)?.record(sites.iter().copied())?;
                    let alone = token_rows(*site, alone.get(*site)?)?;
                    let found = rows.narrow(0, first, ids.len())?;
                    assert_eq!(values(&found), values(&alone), "{}: {site} from {first} on", case.name);
                    first += ids.len();
                }
                assert_eq!(first, rows.dim(0)?);
            }
        }
        let pattern = Site::in_block(0, SiteKind::Pattern);
        let error = record_rows(&case.model, &texts, [pattern]).unwrap_err();
        assert!(error.is_usage() && error.to_string().contains("a separate value for each token"), "{error}");
        assert!(record_rows(&case.model, &[], sites).is_err());
    }
    Ok(())
}

#[test]
fn observers_see_new_tokens_with_a_cache() -> Result<()> {
    let case = Case::open("relu_inner");
    let run = case.clean();
    let (tokens, kinds) = (run.ids.len(), [SiteKind::ResidPost, SiteKind::Z, SiteKind::Pattern, SiteKind::Q]);
    let sites: Vec<Site> =
        (0..case.layers()).flat_map(|layer| kinds.map(|kind| Site::in_block(layer, kind))).collect();
    let whole = run.record(sites.iter().copied())?;
    let mut cache = case.model.new_cache(1, tokens)?;
    for (first, count) in [(0, 5), (5, 1), (6, 1), (7, tokens - 7)] {
        let ids = run.input()?.narrow(1, first, count)?;
        let mut record = Record::new(sites.iter().copied());
        let pass = &mut Pass::inference().observed_by(&mut record);
        case.model.forward_with(&ids, LogitsFor::LastToken, Some(&mut cache), pass)?;
        for site in &sites {
            let axis = if site.kind == SiteKind::Pattern { 2 } else { 1 };
            let mut expected = whole.get(*site)?.narrow(axis, first, count)?;
            if site.kind == SiteKind::Pattern {
                expected = expected.narrow(3, 0, first + count)?; // keys in the cache so far
            }
            assert_close(record.get(*site)?, &expected, SAME, &format!("{site} from token {first}"));
        }
    }
    // Positions are absolute, regardless of chunking.
    let site = Site::in_block(1, SiteKind::ResidPre);
    let edit = || -> candle_core::Result<_> { Ok(Ablate::zero(site)?.at(Place::position(6))) };
    let expected = run.logits(LogitsFor::LastToken, &mut edit()?)?;
    let (mut cache, mut edit, mut found) = (case.model.new_cache(1, tokens)?, edit()?, None);
    for (first, count) in [(0, 4), (4, 5), (9, tokens - 9)] {
        let ids = run.input()?.narrow(1, first, count)?;
        let pass = &mut Pass::inference().observed_by(&mut edit);
        found = Some(case.model.forward_with(&ids, LogitsFor::LastToken, Some(&mut cache), pass)?);
    }
    assert_close(&found.unwrap(), &expected, SAME, "the same edit in chunks");
    Ok(())
}

#[test]
fn observer_of_the_model_sees_every_pass() -> Result<()> {
    let case = Case::open("plain");
    let run = case.clean();
    let vectors = Tensor::from_vec(vec![0.7f32; 2 * case.model.config().n_embd], (2, ()), &Device::Cpu)?;
    let vectors = (vectors
        * Tensor::from_vec(
            (0..2 * case.model.config().n_embd).map(|index| (index % 3) as f32 - 1.0).collect::<Vec<_>>(),
            (2, ()),
            &Device::Cpu,
        )?)?;
    let mut steering = Steering::new(&case.model, 1, vectors.clone())?;
    let expected = run.logits(LogitsFor::EveryToken, &mut steering)?;
    let plain = run.logits(LogitsFor::EveryToken, &mut Chain(Vec::new()))?;
    assert!(values(&expected) != values(&plain));
    let steered =
        case.model.clone().observed_by(Arc::new(Mutex::new(Steering::new(&case.model, 1, vectors.clone())?)));
    let found = steered.forward_with(&run.input()?, LogitsFor::EveryToken, None, &mut Pass::inference())?;
    assert_eq!(values(&found), values(&expected));
    // With a cache, only the first pass is steered; passes over later tokens are not.
    let mut cache = steered.new_cache(1, 5)?;
    for (first, count) in [(0, 3), (3, 1), (4, 1)] {
        let ids = run.input()?.narrow(1, first, count)?;
        let logits =
            steered.forward_with(&ids, LogitsFor::EveryToken, Some(&mut cache), &mut Pass::inference())?;
        let expected = expected.narrow(1, first, count)?;
        assert_close(&logits, &expected, SAME, &format!("from token {first}"));
    }
    // Steering everywhere adds the mean of the vectors at every position.
    let mean = vectors.mean_keepdim(0)?;
    let mut add = Add::new(Site::in_block(1, SiteKind::ResidPre), mean);
    let everywhere = &mut Steering::new(&case.model, 1, vectors)?.everywhere()?;
    assert_eq!(logits(&run, everywhere)?, logits(&run, &mut add)?);
    Ok(())
}

/// Checks that a control vector is added to block outputs at every position, in later passes too.
#[test]
fn control_vectors_are_added_to_block_outputs() -> Result<()> {
    let case = Case::all().next().ok_or("no cases")?;
    let (run, config) = (case.clean(), case.model.config());
    let direction = |offset| pattern(&[config.n_embd], 3.0, offset);
    let last = config.n_layer - 1;
    let directions = BTreeMap::from([(0, direction(1)), (last, direction(5))]);
    let vector = ControlVector::new(directions.clone(), config).unwrap();
    let site = |layer| Site::in_block(layer, SiteKind::ResidPost);
    let add = |layer: usize, scale: f64| -> Result<Edit> {
        Ok(Add::new(site(layer), (directions[&layer].reshape((1, 1, ()))? * scale)?))
    };
    let both = &mut Chain(vec![]);
    let (mut first, mut second) = (add(0, 1.0)?, add(last, 1.0)?);
    both.0.extend([&mut first as &mut dyn Observer, &mut second]);
    let expected = run.logits(LogitsFor::EveryToken, both)?;
    let found = run.logits(LogitsFor::EveryToken, &mut vector.clone())?;
    assert_eq!(values(&found), values(&expected));
    assert_ne!(values(&found), values(&run.logits(LogitsFor::EveryToken, &mut Chain(Vec::new()))?));
    // Token by token with a cache.
    let observed = case.model.clone().observed_by(Arc::new(Mutex::new(vector.clone())));
    let mut cache = observed.new_cache(1, run.ids.len())?;
    for token in 0..run.ids.len() {
        let ids = run.input()?.narrow(1, token, 1)?;
        let pass = &mut Pass::inference();
        let logits = observed.forward_with(&ids, LogitsFor::EveryToken, Some(&mut cache), pass)?;
        assert_close(&logits, &expected.narrow(1, token, 1)?, SAME, &format!("token {token}"));
    }
    // Scaling, selection of blocks, and the sum of two vectors.
    let scaled = vector.clone().scaled(-2.0, 1..=last)?;
    assert_eq!(scaled.directions().keys().collect::<Vec<_>>(), [&last]);
    assert_eq!(logits(&run, &mut scaled.clone())?, logits(&run, &mut add(last, -2.0)?)?);
    let sum = scaled.with(&vector)?;
    let expected = values(&(&directions[&last] * -1.0)?);
    assert_eq!((values(&sum.directions()[&last]), sum.directions().len()), (expected, 2));
    Ok(())
}

#[test]
fn invalid_control_vector_files_are_rejected() {
    let config = Gpt2Config { n_embd: 6, n_head: 2, n_layer: 3, ..Gpt2Config::gpt2() };
    let architecture = |name: &str| BTreeMap::from([("general.architecture".to_owned(), name.to_owned())]);
    let of = |name: &str, width: usize| BTreeMap::from([(name.to_owned(), pattern(&[width], 1.0, 0))]);
    let read = |entries: &BTreeMap<String, String>, tensors: &BTreeMap<String, Tensor>| {
        ControlVector::from_tensors(tensors, entries, &config)
    };
    let ours = architecture("controlvector");
    assert_eq!(read(&ours, &of("direction.2", 6)).unwrap().directions().keys().collect::<Vec<_>>(), [&2]);
    for (entries, tensors, expected) in [
        (
            &BTreeMap::new(),
            of("direction.1", 6),
            "`general.architecture`: expected controlvector; found nothing",
        ),
        (&architecture("gpt2"), of("direction.1", 6), "expected controlvector; found gpt2"),
        (
            &ours,
            of("direction.0", 6),
            "expected tensors named `direction.1`, `direction.2`, …; found direction.0",
        ),
        (&ours, of("token_embd.weight", 6), "found token_embd.weight"),
        (&ours, of("direction.3", 6), "`direction.3`: expected a block below 3; found 3"),
        (&ours, of("direction.1", 7), "tensor `direction.1`: expected shape (6), found (7)"),
        (&ours, BTreeMap::new(), "tensor `direction.1` is missing"),
    ] {
        let error = read(entries, &tensors).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn patching_the_whole_residual_stream_restores_the_clean_run() -> Result<()> {
    for case in Case::all() {
        let patching = Patching::new(case.clean(), case.corrupted(), case.metric())?;
        for (layer, value) in
            patching.grid(SiteKind::ResidPre, GridAxis::Layer, &|| ())?.values.iter().enumerate()
        {
            assert!((value[0] - 1.0).abs() < 1e-4, "{}: block {layer}: {}", case.name, value[0]);
        }
        // A path without senders leaves the clean run unchanged.
        let clean = patching.path(&[], Receiver::Final)?;
        assert!((clean - patching.clean_value).abs() < 1e-4);
    }
    Ok(())
}

/// Compares gradients with central differences along the gradient, where the change is largest.
///
/// The check is `m(x + ε g) - m(x - ε g) = 2 ε g·g`.
#[test]
fn gradients_at_every_hook_point_match_finite_differences() -> Result<()> {
    const STEP: f64 = 1e-3;
    for case in Case::all() {
        let (run, metric) = (case.clean(), case.metric());
        let sites: Vec<Site> = Site::all(case.layers())
            .into_iter()
            .filter(|site| !matches!(site.kind, SiteKind::Logits))
            .collect();
        for (site, gradient) in site_gradients(&run, &metric, &sites)? {
            // Masked scores have no gradient.
            let length = gradient.sqr()?.sum_all()?.to_scalar::<f32>()?.sqrt();
            assert!(length.is_finite() && length > 0.0, "{}: {site}: {length}", case.name);
            let direction = (&gradient / f64::from(length))?;
            let at = |step: f64| -> Result<f64> {
                let mut add = Add::new(site, (&direction * step)?);
                Ok(f64::from(metric.of_run(&run, &mut add)?))
            };
            let found = (at(STEP)? - at(-STEP)?) / (2.0 * STEP);
            // The tolerance covers rounding (1e-6 for logits near 10, divided by the step) and the curvature.
            let expected = f64::from(length);
            assert!(
                (found - expected).abs() < 5e-3 + 0.01 * expected,
                "{}: {site}: {found} for {expected}",
                case.name
            );
        }
    }
    Ok(())
}

/// A dictionary with arbitrary weights; a transcoder if it writes to a different hook point.
fn dictionary(width: usize, reads: Site, writes: Site) -> Result<Dictionary> {
    const LATENTS: usize = 40;
    let tensors = [
        ("W_enc", pattern(&[width, LATENTS], 1.0, 1)),
        ("b_enc", pattern(&[LATENTS], 1.0, 2)),
        ("W_dec", pattern(&[LATENTS, width], 0.3, 3)),
        ("b_dec", pattern(&[width], 0.3, 4)),
    ];
    let tensors = tensors.map(|(name, tensor)| (name.to_owned(), tensor)).into();
    let kind = match reads == writes {
        true => r#""architecture": "standard""#.to_owned(),
        false => format!(r#""architecture": "transcoder", "hook_name_out": "{writes}", "d_out": {width}"#),
    };
    let config = format!(
        r#"{{{kind}, "hook_name": "{reads}", "d_in": {width}, "d_sae": {LATENTS}, "apply_b_dec_to_input": false,
            "model_from_pretrained_kwargs": {{}}}}"#
    );
    Ok(Dictionary::from_tensors(&tensors, &DictionaryConfig::from_json(&config)?)?)
}

/// Covers a steering vector, a replaced head at one token, and a dictionary at the second block.
#[test]
fn gradients_under_edits_and_splices_match_finite_differences() -> Result<()> {
    // A short step, so that no latent turns on or off.
    const STEP: f64 = 3e-4;
    let case = Case::open("inverse_layer");
    let (run, metric, width) = (case.clean(), case.metric(), case.model.config().n_embd);
    let site = |layer, kind| Site::in_block(layer, kind);
    let mut steering = Steering::new(&case.model, 0, pattern(&[2, width], 1.0, 5))?;
    let mut patch = Replace::new(site(0, SiteKind::Z), Tensor::new(0.5f32, &Device::Cpu)?)
        .at(Place { positions: Some(vec![3]), ..Place::head(1) });
    for reads in [site(1, SiteKind::ResidPre), site(1, SiteKind::ResidMid)] {
        let writes = if reads.kind == SiteKind::ResidPre { reads } else { site(1, SiteKind::MlpOut) };
        let dictionary = dictionary(width, reads, writes)?;
        let sites = [SiteKind::ResidPre, SiteKind::Z, SiteKind::MlpPost, SiteKind::AttnOut]
            .map(|kind| site(0, kind))
            .into_iter()
            .chain([writes, site(2, SiteKind::ResidPost)]);
        let sites: Vec<Site> = sites.collect();
        let mut splices = [Splice::new(&case.model, &dictionary)?];
        let edits = &mut Chain(vec![&mut steering, &mut patch]);
        let found = gradients_under(&run, &metric, &sites, &mut splices, edits)?;
        for (site, found) in &found.sites {
            let length = found.gradient.sqr()?.sum_all()?.to_scalar::<f32>()?.sqrt();
            let direction = (&found.gradient / f64::from(length))?;
            let mut at = |step: f64| -> Result<f64> {
                let mut add = Add::new(*site, (&direction * step)?);
                // An edit at the dictionary's output must run after the splice, and any other edit before it.
                let splice = &mut splices[0];
                let last: [&mut dyn Observer; 2] =
                    if *site == writes { [splice, &mut add] } else { [&mut add, splice] };
                let mut chain = Chain(vec![&mut steering, &mut patch]);
                chain.0.extend(last);
                Ok(f64::from(metric.of_run(&run, &mut chain)?))
            };
            let (slope, expected) = ((at(STEP)? - at(-STEP)?) / (2.0 * STEP), f64::from(length));
            assert!((slope - expected).abs() < 5e-3 + 0.01 * expected, "{site}: {slope} for {expected}");
        }
        // Each latent writes its own direction. Without the error term, the error has no gradient.
        let (latents, error) = &found.splices[0];
        let written = &found.sites[&writes].gradient;
        let expected = written.squeeze(0)?.matmul(&dictionary.tensor("W_dec").ok_or("no decoder")?.t()?)?;
        assert_close(&latents.gradient.squeeze(0)?, &expected, SAME, "the gradient at the latents");
        assert!(error.is_none() && values(&latents.value).iter().any(|latent| *latent > 0.0));

        // With the error term, the run equals the unspliced run, and the error is part of the written
        // activation.
        let mut splices = [Splice::new(&case.model, &dictionary)?.with_error()];
        let edits = &mut Chain(vec![&mut steering, &mut patch]);
        let with_error = gradients_under(&run, &metric, &[writes], &mut splices, edits)?;
        let unspliced = metric.of_run(&run, edits)?;
        assert!((with_error.metric - unspliced).abs() < 1e-4, "{} for {unspliced}", with_error.metric);
        let (_, error) = &with_error.splices[0];
        let error = error.as_ref().ok_or("no error")?;
        assert_close(&error.gradient, &with_error.sites[&writes].gradient, SAME, "the gradient at the error");
    }
    // Nothing depends on an activation that is replaced entirely.
    let replaced = site(1, SiteKind::ResidPost);
    let mut edit = Replace::new(replaced, Tensor::zeros(1, DType::F32, &Device::Cpu)?);
    let error =
        gradients_under(&run, &metric, &[site(1, SiteKind::ResidPre)], &mut [], &mut edit).unwrap_err();
    assert!(error.to_string().contains("the metric does not depend on blocks.1.hook_resid_pre"), "{error}");
    Ok(())
}

#[test]
fn score_estimates_sum_over_heads_and_positions() -> Result<()> {
    for case in Case::all() {
        let patching = Patching::new(case.clean(), case.corrupted(), case.metric())?;
        let of = |by| estimated_grid(&patching, SiteKind::AttnScores, by);
        let (whole, heads, places) =
            (of(GridAxis::Layer)?, of(GridAxis::Head)?, of(GridAxis::HeadAndPosition)?);
        for layer in 0..case.layers() {
            let (heads, places) = (heads[layer].iter().sum::<f32>(), places[layer].iter().sum::<f32>());
            for sum in [heads, places] {
                assert!((sum - whole[layer][0]).abs() < 1e-4, "{}: {sum} for {}", case.name, whole[layer][0]);
            }
        }
    }
    Ok(())
}

#[test]
fn integrated_gradients_are_complete() -> Result<()> {
    for case in Case::all() {
        for measure in [Measure::Logit, Measure::LogProbability, Measure::Probability] {
            let metric = Metric { measure, ..case.metric() };
            let saliency = Saliency::Integrated { steps: 200, baseline: 0 };
            let found = token_weights(&case.clean(), &metric, saliency)?;
            let (sum, difference) =
                (found.sums.iter().sum::<f32>(), found.values.0 - found.values.1.unwrap());
            // Midpoint rule with 200 steps, over paths where logits move by up to ten.
            assert!(
                (sum - difference).abs() < 0.02 * difference.abs().max(1.0),
                "{}: {measure:?}: {sum} for {difference}",
                case.name
            );
        }
        let gradient = token_weights(&case.clean(), &case.metric(), Saliency::Gradient)?;
        let expected = &site_gradients(&case.clean(), &case.metric(), &[Site::outside(SiteKind::Embed)])?;
        let expected = expected[&Site::outside(SiteKind::Embed)].sqr()?.sum(2)?.sqrt()?.squeeze(0)?;
        assert_close(
            &Tensor::new(&gradient.norms[..], &Device::Cpu)?,
            &expected,
            SAME,
            "norms of the gradient",
        );
    }
    Ok(())
}

#[test]
fn edit_affects_only_the_selected_elements() -> Result<()> {
    let case = Case::open("gelu");
    let run = case.clean();
    let site = Site::in_block(1, SiteKind::Z);
    let z = run.record([site])?.get(site)?.clone(); // (1, T, H, D)
    let place = Place { positions: Some(vec![2, 4]), channels: Some(vec![3]), ..Place::head(1) };
    let mut edit = Ablate::zero(site)?.at(place).at(Place { channels: Some(vec![0]), ..Place::position(0) });
    let mut record = Record::new([site]);
    run.logits(LogitsFor::LastToken, &mut Chain(vec![&mut edit, &mut record]))?;
    let (_, tokens, heads, width) = z.dims4()?;
    let (before, after) = (values(&z), values(record.get(site)?));
    for token in 0..tokens {
        for head in 0..heads {
            for channel in 0..width {
                let index = (token * heads + head) * width + channel;
                let is_changed =
                    (head == 1 && [2, 4].contains(&token) && channel == 3) || (token == 0 && channel == 0);
                let expected = if is_changed { 0.0 } else { before[index] };
                assert_eq!(after[index], expected, "token {token}, head {head}, channel {channel}");
            }
        }
    }
    Ok(())
}

#[test]
fn steering_keeps_f64_precision() -> Result<()> {
    let case = Case::open("plain");
    let width = case.model.config().n_embd;
    let vectors = Tensor::full(1e-12f64, (1, width), &Device::Cpu)?;
    let mut steering = Steering::new(&case.model, 0, vectors)?;
    steering.begin(&[0], 1);
    let site = Site::in_block(0, SiteKind::ResidPre);
    let steered = steering.observe(site, Tensor::ones((1, 1, width), DType::F64, &Device::Cpu)?)?;
    assert_eq!(values(&steered), vec![1.0 + 1e-12; width]);
    Ok(())
}

#[test]
fn mean_ablation_keeps_f64_precision() -> Result<()> {
    let (model, ids) = (seeded(&small(), DType::F64), vec![3, 1, 4]);
    let (run, site) = (Run::new(&model, &ids)?, Site::in_block(1, SiteKind::Z));
    let means = Ablation::Mean(vec![ids.clone()]).values(&run)?;
    assert_eq!(values(&means[1]), values(run.record([site])?.get(site)?), "the mean over a single text");
    Ok(())
}

#[test]
fn invalid_requests_are_rejected() -> Result<()> {
    let case = Case::open("plain");
    let (run, metric) = (case.clean(), case.metric());
    let usage_message = |error: InterpretError| {
        assert!(error.is_usage(), "{error}");
        error.to_string()
    };
    let long = vec![0; case.model.config().n_positions + 1];
    assert!(usage_message(Run::new(&case.model, &long).err().unwrap()).contains("the model accepts 1 to 19"));
    assert!(usage_message(Run::new(&case.model, &[]).err().unwrap()).contains("0 tokens"));
    assert!(
        usage_message(Run::new(&case.model, &[61]).err().unwrap()).contains("outside the vocabulary of 61")
    );
    let watch = LensOptions { top: 1, watch: vec![61] };
    let error = logit_lens(&run, &watch, &|_, residual| Ok(residual)).unwrap_err();
    assert!(error.to_string().contains("token 61 is outside the vocabulary of 61"), "{error}");
    let row = [vec![0.0; 61]];
    for (watch, next) in [(vec![60, 61], 60), (vec![60], 61)] {
        let error = lens_cells(&row, &row, &LensOptions { top: 1, watch }, &[next]).unwrap_err();
        assert!(error.to_string().contains("token 61 is outside the vocabulary of 61"), "{error}");
    }
    let shorter = Run::new(&case.model, &case.corrupted[1..])?;
    assert!(usage_message(Patching::new(run, shorter, metric).err().unwrap()).contains("8 and 7 tokens"));
    assert!(
        usage_message(Patching::new(run, run, metric).err().unwrap()).contains("there is nothing to explain")
    );
    let patching = Patching::new(run, case.corrupted(), metric)?;
    for (kind, by, expected) in [
        (SiteKind::ResidPre, GridAxis::Head, "expected a hook point with heads"),
        (SiteKind::Logits, GridAxis::Position, "inside the blocks"),
    ] {
        assert!(usage_message(patching.grid(kind, by, &|| ()).unwrap_err()).contains(expected));
    }
    let head = candle_gpt2_interpret::Head { layer: 1, head: 3 };
    let error = usage_message(patching.path(&[head], Receiver::Final).unwrap_err());
    assert_eq!(error, "head 1.3 is out of range; the model has 2 layers of 3 heads, counted from 0");
    let behind = Metric { position: 8, ..metric };
    assert!(
        usage_message(behind.check(&run).unwrap_err())
            .contains("position 8 (counted from 0) is out of range")
    );
    // A replacement must have the dtype and shape of the original.
    let site = Site::in_block(0, SiteKind::AttnOut);
    struct Wrong(Site);
    impl Observer for Wrong {
        fn wants(&self, site: Site) -> bool {
            site == self.0
        }
        fn observe(&mut self, _: Site, value: Tensor) -> candle_core::Result<Tensor> {
            value.to_dtype(DType::F64)
        }
    }
    let error = run.logits(LogitsFor::LastToken, &mut Wrong(site)).unwrap_err().to_string();
    assert!(
        error.contains("blocks.0.hook_attn_out: expected a replacement of shape and dtype ([1, 8, 21], F32)"),
        "{error}"
    );
    Ok(())
}

#[test]
fn random_tokens_stay_in_range() {
    let rows = random_rows(7, 3, 1000, 5, 9);
    assert!(rows.iter().flatten().all(|id| (5..9).contains(id)));
    assert!((5..9).all(|id| rows.iter().flatten().any(|other| *other == id)));
    assert_ne!(rows[0], rows[1]);
    assert_eq!(rows, random_rows(7, 3, 1000, 5, 9));
}
