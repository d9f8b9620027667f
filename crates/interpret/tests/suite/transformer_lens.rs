//! Comparison with f64 results from TransformerLens 4.3.0 (`scripts/reference/inside.py`).

use candle_core::{Device, Tensor};
use candle_gpt2::{LogitsFor, Site, SiteKind};
use candle_gpt2_interpret::{
    Ablation, Grid, GridAxis, Head, IgnoredEntries, LensOptions, Metric, Patching, PatternSimilarity,
    PerHead, Processing, Receiver, Run, TargetPattern, Unit, ablation_grid, accumulated_residuals, attribute,
    center, decomposed_residual, detect_heads, estimated_grid, head_results, head_scores, lens_logits,
    logit_lens, site_gradients,
};
use candle_gpt2_testing::{assert_close, assert_close_absolute};

use crate::common::{Case, ids};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Tolerance between f32 and f64 sums of up to a hundred products of values near 1.
const ACTIVATIONS: f64 = 1e-5;
/// Tolerance for sums and quotients of activations.
const STACKS: f64 = 1e-4;

fn site_name(site: Site) -> String {
    if site.kind == SiteKind::Logits { "logits".to_owned() } else { site.to_string() }
}

fn tensor(values: &[Vec<f32>], shape: &[usize]) -> Tensor {
    Tensor::from_vec(values.concat(), shape, &Device::Cpu).unwrap()
}

fn grid_tensor(grid: &Grid, shape: &[usize]) -> Tensor {
    assert_eq!(grid.unchanged, [] as [usize; 0]);
    tensor(&grid.values, shape)
}

fn per_head_tensor(values: &PerHead) -> Tensor {
    tensor(values, &[values.len(), values[0].len()])
}

#[test]
fn every_hook_point_matches_transformer_lens() -> Result<()> {
    for case in Case::all() {
        let record = case.clean().record(Site::all(case.layers()))?;
        let processing = Processing::new(&case.model)?;
        assert_eq!(record.values.len(), 6 + 18 * case.layers());
        for (site, value) in &record.values {
            let (name, what) = (site_name(*site), format!("{}: {site}", case.name));
            assert_close(value, &case.raw.tensor(&name), ACTIVATIONS, &what);
            let processed = match site.kind {
                SiteKind::FinalNorm => record.get(Site::outside(SiteKind::LnFinalNormalized))?.clone(),
                _ => processing.apply(*site, value)?,
            };
            assert_close(&processed, &case.compat.tensor(&name), ACTIVATIONS, &format!("{what}, processed"));
        }
    }
    Ok(())
}

#[test]
fn residual_stacks_match_transformer_lens() -> Result<()> {
    for case in Case::all() {
        let run = case.clean();
        let what = |name: &str| format!("{}: {name}", case.name);
        let accumulated = accumulated_residuals(&run, true)?;
        assert_eq!(accumulated.labels, case.labels("accumulated_resid"));
        let expected = |name: &str| -> Result<Tensor> { Ok(case.analysis(name).squeeze(1)?) };
        assert_close(
            &center(&accumulated.values)?,
            &expected("accumulated_resid")?,
            STACKS,
            &what("accumulated_resid"),
        );
        let decomposed = decomposed_residual(&run)?;
        assert_eq!(decomposed.labels, case.labels("decompose_resid"));
        assert_close(
            &center(&decomposed.values)?,
            &expected("decompose_resid")?,
            STACKS,
            &what("decompose_resid"),
        );
        // The constant parts of the values are in the remainder.
        let heads = head_results(&run, Some(&Processing::new(&case.model)?))?;
        assert_eq!(heads.labels, case.labels("stack_head_results"));
        assert_close(
            &center(&heads.values)?,
            &expected("stack_head_results")?,
            STACKS,
            &what("stack_head_results"),
        );
        let raw = head_results(&run, None)?.values;
        assert_close(&raw.sum(0)?, &heads.values.sum(0)?, STACKS, "both add up to the residual stream");
        let last = raw.narrow(0, raw.dim(0)? - 1, 1)?;
        let of_raw = (raw.sum_keepdim(0)? - last)?;
        let of_runs: Vec<Tensor> = (0..case.layers())
            .map(|layer| case.raw.tensor(&format!("blocks.{layer}.attn.hook_result")).sum(2))
            .collect::<candle_core::Result<_>>()?;
        assert_close(&of_raw, &Tensor::stack(&of_runs, 0)?.sum(0)?, STACKS, "heads of the model as it is");
    }
    Ok(())
}

#[test]
fn attributions_match_transformer_lens() -> Result<()> {
    for case in Case::all() {
        let run = case.clean();
        for (name, metric) in
            [("difference", case.metric()), ("answer", Metric { against: None, ..case.metric() })]
        {
            let (b_u, position) = (case.analysis("b_U"), metric.position);
            let bias_of = |id: u32| -> Result<f32> { Ok(b_u.get(id as usize)?.to_scalar()?) };
            let mut bias = bias_of(metric.answer)?;
            if let Some(against) = metric.against {
                bias -= bias_of(against)?;
            }
            for (unit, stack) in [
                (Unit::Component, "decompose_resid"),
                (Unit::Layer, "accumulated_resid"),
                (Unit::Neuron, "stack_neuron_results.last"),
                (Unit::TransformerLensHead, "stack_head_results"),
            ] {
                let found = attribute(&run, &metric, unit)?;
                let expected = case.analysis(&format!("logit_attrs.{stack}.{name}"));
                let expected = match expected.dims().len() {
                    3 => expected.squeeze(1)?.narrow(1, position, 1)?.squeeze(1)?,
                    _ => expected.squeeze(1)?,
                };
                let what = format!("{}: {stack}, {name}", case.name);
                let values = Tensor::new(&found.values[..], &Device::Cpu)?;
                assert_close(&values, &expected, STACKS, &what);
                assert!((found.bias - bias).abs() < 1e-4, "{what}: bias {} for {bias}", found.bias);
                if unit != Unit::Layer {
                    let sum: f32 = found.values.iter().sum::<f32>() + found.bias;
                    assert!((sum - found.total).abs() < 1e-3, "{what}: {sum} for {}", found.total);
                }
            }
            // For heads of the unmodified model, the constants belong to the heads and not to the remainder.
            let found = attribute(&run, &metric, Unit::Head)?;
            let sum: f32 = found.values.iter().sum::<f32>() + found.bias;
            assert!((sum - found.total).abs() < 1e-3, "{}: heads {sum} for {}", case.name, found.total);
        }
        let total = attribute(&run, &case.metric(), Unit::Component)?.total;
        let expected = case.recorded["logit_difference"]["clean"].as_f64().unwrap();
        assert!((f64::from(total) - expected).abs() < 1e-4, "{}: {total} for {expected}", case.name);
    }
    Ok(())
}

#[test]
fn logit_lens_matches_transformer_lens() -> Result<()> {
    for case in Case::all() {
        let run = case.clean();
        let expected = case.analysis("lens.logits").squeeze(1)?;
        lens_logits(&run, &|_, x| Ok(x), |layer, logits| {
            assert_close(
                &center(&logits)?.squeeze(0)?,
                &expected.get(layer)?,
                STACKS,
                &format!("{}: layer {layer}", case.name),
            );
            Ok(())
        })?;
        let watch = vec![case.id("answer"), case.id("wrong")];
        let layers = logit_lens(&run, &LensOptions { top: 3, watch }, &|_, x| Ok(x))?;
        let labels: Vec<&str> = layers.iter().map(|layer| &layer.label[..]).collect();
        assert_eq!(labels, case.labels("lens"));
        let cells = || layers.iter().flat_map(|layer| &layer.cells);
        let shape = [layers.len(), 1, run.ids.len()];
        let entropy: Vec<f32> = cells().map(|cell| cell.entropy).collect();
        assert_close(
            &Tensor::from_vec(entropy, &shape, &Device::Cpu)?,
            &case.analysis("lens.entropy"),
            STACKS,
            "entropy",
        );
        let divergence: Vec<f32> = cells().map(|cell| cell.divergence).collect();
        assert_close(
            &Tensor::from_vec(divergence, &shape, &Device::Cpu)?,
            &case.analysis("lens.kl"),
            STACKS,
            "divergence",
        );
        for (index, name) in ["answer", "wrong"].into_iter().enumerate() {
            let ranks: Vec<usize> = cells().map(|cell| cell.watched[index].0).collect();
            let expected: Vec<u32> =
                case.recorded["lens.ranks"][name].as_array().unwrap().iter().flat_map(ids).collect();
            assert_eq!(
                ranks,
                expected.iter().map(|rank| *rank as usize).collect::<Vec<_>>(),
                "{}",
                case.name
            );
        }
        // The top three are the largest logits, in order.
        let of_last: Vec<f32> = expected.get(layers.len() - 1)?.get(run.ids.len() - 1)?.to_vec1()?;
        let mut order: Vec<u32> = (0..).take(of_last.len()).collect();
        order.sort_by(|a, b| of_last[*b as usize].total_cmp(&of_last[*a as usize]));
        let top: Vec<u32> =
            layers[layers.len() - 1].cells[run.ids.len() - 1].top.iter().map(|(id, _)| *id).collect();
        assert_eq!(top, order[..3]);
    }
    Ok(())
}

#[test]
fn every_patching_grid_matches_transformer_lens() -> Result<()> {
    for case in Case::all() {
        let patching = Patching::new(case.clean(), case.corrupted(), case.metric())?;
        let [clean, corrupted] =
            ["clean", "corrupted"].map(|name| case.recorded["logit_difference"][name].as_f64().unwrap());
        assert!((f64::from(patching.clean_value) - clean).abs() < 1e-4);
        assert!((f64::from(patching.corrupted_value) - corrupted).abs() < 1e-4);
        for (name, kind, by) in [
            ("resid_pre", SiteKind::ResidPre, GridAxis::Position),
            ("resid_mid", SiteKind::ResidMid, GridAxis::Position),
            ("attn_out", SiteKind::AttnOut, GridAxis::Position),
            ("mlp_out", SiteKind::MlpOut, GridAxis::Position),
            ("attn_head_out_all_pos", SiteKind::Z, GridAxis::Head),
            ("attn_head_q_all_pos", SiteKind::Q, GridAxis::Head),
            ("attn_head_k_all_pos", SiteKind::K, GridAxis::Head),
            ("attn_head_v_all_pos", SiteKind::V, GridAxis::Head),
            ("attn_head_pattern_all_pos", SiteKind::Pattern, GridAxis::Head),
            ("attn_head_out_by_pos", SiteKind::Z, GridAxis::HeadAndPosition),
            ("attn_head_pattern_by_pos", SiteKind::Pattern, GridAxis::HeadAndPosition),
        ] {
            let grid = patching.grid(kind, by, &|| ())?;
            let mut expected = case.analysis(&format!("patch.{name}"));
            if name == "attn_head_pattern_by_pos" {
                expected = expected.transpose(1, 2)?; // TransformerLens has [layer, head, query]
            }
            let found = grid_tensor(&grid, expected.dims());
            assert_close(&found, &expected, STACKS, &format!("{}: {name}", case.name));
        }
    }
    Ok(())
}

#[test]
fn ablations_match_transformer_lens() -> Result<()> {
    for case in Case::all() {
        let run = case.clean();
        let texts = case.recorded["ablate.reference_ids"].as_array().unwrap().iter().map(ids).collect();
        for (name, ablation) in [
            ("raw_zero", Ablation::RawZero),
            ("tl_zero", Ablation::TransformerLensZero),
            ("mean", Ablation::Mean(texts)),
        ] {
            let grid = ablation_grid(&run, &case.metric(), &ablation, &|| ())?;
            let expected = case.analysis(&format!("ablate.{name}"));
            assert_close(
                &grid_tensor(&grid, expected.dims()),
                &expected,
                STACKS,
                &format!("{}: {name}", case.name),
            );
        }
    }
    Ok(())
}

#[test]
fn head_detection_matches_transformer_lens() -> Result<()> {
    for case in Case::all() {
        let detected = ids(&case.recorded["detect_head"]["ids"]);
        let run = Run::new(&case.model, &detected).unwrap();
        for (name, target) in [
            ("previous_token_head", TargetPattern::Previous),
            ("duplicate_token_head", TargetPattern::Duplicate),
            ("induction_head", TargetPattern::Induction),
        ] {
            for (measure, similarity) in
                [("mul", PatternSimilarity::Share), ("abs_unrounded", PatternSimilarity::Difference)]
            {
                let expected = case.analysis(&format!("detect_head.{name}.{measure}"));
                for (index, (bos, current)) in
                    [(false, false), (true, false), (false, true), (true, true)].into_iter().enumerate()
                {
                    let found = detect_heads(&run, &target, similarity, IgnoredEntries { bos, current })?;
                    let what = format!("{}: {name}, {measure}, {bos} {current}", case.name);
                    assert_close_absolute(&per_head_tensor(&found), &expected.get(index)?, STACKS, &what);
                }
            }
        }
        let rows: Vec<Vec<u32>> =
            case.recorded["head_scores"]["ids"].as_array().unwrap().iter().map(ids).collect();
        let length = usize::try_from(case.recorded["head_scores"]["length"].as_u64().unwrap())?;
        let rows: Vec<Vec<u32>> = rows.into_iter().map(|row| row[..length].to_vec()).collect();
        let scores = head_scores(&case.model, &rows, None)?;
        for (name, found) in
            [("previous", scores.previous), ("duplicate", scores.duplicate), ("induction", scores.induction)]
        {
            let expected = case.analysis(&format!("head_scores.{name}"));
            assert_close_absolute(
                &per_head_tensor(&found),
                &expected,
                STACKS,
                &format!("{}: {name}", case.name),
            );
        }
    }
    Ok(())
}

#[test]
fn attribution_patching_matches_transformer_lens() -> Result<()> {
    for case in Case::all() {
        let patching = Patching::new(case.clean(), case.corrupted(), case.metric())?;
        for (name, kind, by) in [
            ("resid_pre", SiteKind::ResidPre, GridAxis::Position),
            ("mlp_out", SiteKind::MlpOut, GridAxis::Position),
            ("z", SiteKind::Z, GridAxis::Head),
            ("z_by_pos", SiteKind::Z, GridAxis::HeadAndPosition),
        ] {
            let expected = case.analysis(&format!("attribution.{name}"));
            let found = tensor(&estimated_grid(&patching, kind, by)?, expected.dims());
            assert_close(&found, &expected, STACKS, &format!("{}: {name}", case.name));
        }
        let sites: Vec<Site> = (0..case.layers())
            .flat_map(|layer| [SiteKind::ResidPre, SiteKind::Z].map(|kind| Site::in_block(layer, kind)))
            .collect();
        for (site, gradient) in site_gradients(&case.corrupted(), &case.metric(), &sites)? {
            let expected = case.analysis(&format!("gradient.{site}"));
            assert_close(&gradient, &expected, STACKS, &format!("{}: gradient at {site}", case.name));
        }
    }
    Ok(())
}

#[test]
fn path_patching_matches_transformer_lens() -> Result<()> {
    for case in Case::all() {
        let patching = Patching::new(case.clean(), case.corrupted(), case.metric())?;
        let head = |value: &serde_json::Value| {
            let [layer, head] = ids(value)[..] else { panic!("a head") };
            Head { layer: layer as usize, head: head as usize }
        };
        for path in case.recorded["paths"].as_array().unwrap() {
            let (sender, receiver) = (head(&path["sender"]), head(&path["receiver"]));
            for (name, receiver) in [
                ("q", Receiver::Query(receiver)),
                ("k", Receiver::Key(receiver)),
                ("v", Receiver::Value(receiver)),
                ("final", Receiver::Final),
            ] {
                let found = f64::from(patching.path(&[sender], receiver)?);
                let expected = path["logit_difference"][name].as_f64().unwrap();
                assert!((found - expected).abs() < STACKS, "{}: {name}: {found} for {expected}", case.name);
            }
        }
        let to_final = case.analysis("path.to_final");
        for layer in 0..case.layers() {
            for head in 0..case.heads() {
                let found = patching.path(&[Head { layer, head }], Receiver::Final)?;
                let expected = to_final.get(layer)?.get(head)?.to_scalar::<f32>()?;
                assert!(
                    (found - expected).abs() < 1e-4,
                    "{}: {layer}.{head}: {found} for {expected}",
                    case.name
                );
            }
        }
    }
    Ok(())
}

#[test]
fn recorded_logits_match_transformer_lens() -> Result<()> {
    for case in Case::all() {
        let mut record = candle_gpt2_interpret::Record::new([Site::outside(SiteKind::Logits)]);
        case.clean().logits(LogitsFor::EveryToken, &mut record)?;
        assert_close(
            record.get(Site::outside(SiteKind::Logits))?,
            &case.raw.tensor("logits"),
            ACTIVATIONS,
            case.name,
        );
    }
    Ok(())
}
