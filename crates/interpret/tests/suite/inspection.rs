//! Edits and recordings, which give the same results in chunks and on the whole sequence.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use candle_gpt2::{Gpt2LMHeadModel, LogitsFor, Observer, Pass, Site, SiteKind};
use candle_gpt2_interpret::{
    Add, ControlVector, Edit, Inspection, Positions, ProjectOut, Replace, named_site, token_shape,
};
use candle_gpt2_testing::{assert_close, pattern, values};

use crate::common::Case;

/// Tolerance for f32 sums computed in a different order.
const SAME: f64 = 2e-5;

/// Runs a sequence in chunks of `tokens` tokens and returns the logits at all positions.
fn read(model: &Gpt2LMHeadModel, ids: &[u32], tokens: usize, observer: &mut dyn Observer) -> Vec<f64> {
    let mut cache = model.new_cache(1, ids.len()).unwrap();
    let mut logits = Vec::new();
    for piece in ids.chunks(tokens) {
        let piece = Tensor::from_slice(piece, (1, piece.len()), &Device::Cpu).unwrap();
        let pass = &mut Pass::inference().observed_by(observer);
        logits.extend(values(
            &model.forward_with(&piece, LogitsFor::EveryToken, Some(&mut cache), pass).unwrap(),
        ));
    }
    logits
}

#[test]
fn chunked_record_equals_the_whole_sequence() {
    for case in Case::all() {
        let (model, ids) = (&case.model, &case.clean);
        let sites: Vec<Site> =
            Site::all(case.layers()).into_iter().filter(|site| site.kind != SiteKind::Logits).collect();
        let whole = case.clean().record(sites.iter().copied()).unwrap();
        let count = ids.len();
        for (positions, expected) in [
            (Positions::All(0..usize::MAX), (0..count).collect()),
            (Positions::All(1..count - 1), (1..count - 1).collect()),
            (Positions::Last(0..3), vec![2]),
            (Positions::Last(0..usize::MAX), vec![count - 1]),
            (Positions::These([1, count - 2, count + 5].into()), vec![1, count - 2]),
        ] {
            assert_eq!(positions.max_count(count), expected.len());
            let keys = expected.last().unwrap() + 1;
            for tokens in [1, 3, 1000] {
                let mut inspection = Inspection::new(Vec::new(), sites.clone(), positions.clone());
                read(model, ids, tokens, &mut inspection);
                assert_eq!(inspection.positions(), expected, "{positions:?} in {tokens}");
                let record = inspection.record().unwrap();
                let indices: Vec<u32> =
                    expected.iter().map(|position| u32::try_from(*position).unwrap()).collect();
                let indices = Tensor::new(&indices[..], &Device::Cpu).unwrap();
                for site in &sites {
                    let axis = site.kind.token_axis();
                    let mut from_whole = whole.get(*site).unwrap().index_select(&indices, axis).unwrap();
                    let is_of_keys = matches!(site.kind, SiteKind::AttnScores | SiteKind::Pattern);
                    if is_of_keys {
                        from_whole = from_whole.narrow(3, 0, keys).unwrap();
                    }
                    let found = record.get(*site).unwrap();
                    let mut shape = token_shape(model.config(), site.kind, keys);
                    shape.insert(axis - 1, expected.len());
                    assert_eq!(found.dims()[1..], shape, "{site}");
                    // Masked scores are minus infinity in both records.
                    let finite = |x: &Tensor| x.maximum(-1e9).unwrap();
                    assert_close(
                        &finite(found),
                        &finite(&from_whole),
                        SAME,
                        &format!("{}: {site}", case.name),
                    );
                }
            }
        }
    }
}

#[test]
fn positions_outside_the_sequence_record_nothing() {
    let case = Case::open("plain");
    let site = named_site("resid_post0").unwrap();
    let mut inspection = Inspection::new(Vec::new(), vec![site], Positions::Last(500..usize::MAX));
    let plain =
        read(&case.model, &case.clean, 4, &mut Inspection::new(Vec::new(), Vec::new(), Positions::All(0..9)));
    assert_eq!(read(&case.model, &case.clean, 4, &mut inspection), plain);
    assert_eq!(inspection.positions(), [0; 0]);
    assert!(inspection.record().unwrap().values.is_empty());
}

/// Checks that `Add` matches a control vector bit for bit, and that scale 0 disables any edit.
#[test]
fn scale_sets_the_strength_of_an_edit() {
    for case in Case::all() {
        let (model, ids, width) = (&case.model, &case.clean, case.model.config().n_embd);
        let vector = pattern(&[width], 1.0, 3);
        let site = named_site("resid_post0").unwrap();
        let with = |edit: Edit, tokens| {
            let mut inspection = Inspection::new(vec![edit], Vec::new(), Positions::All(0..0));
            read(model, ids, tokens, &mut inspection)
        };
        let plain = read(model, ids, 3, &mut Inspection::new(Vec::new(), Vec::new(), Positions::All(0..0)));
        let add = Add::new(site, vector.clone()).scaled(2.5).unwrap();
        let directions = BTreeMap::from([(0, vector.clone())]);
        let mut control = ControlVector::new(directions, model.config()).unwrap().scaled(2.5, 0..=0).unwrap();
        let steered = read(model, ids, 1000, &mut control);
        assert_ne!(steered, plain);
        for tokens in [1, 3, 1000] {
            assert_eq!(with(add.clone(), tokens), steered, "{}: in chunks of {tokens}", case.name);
        }
        for edit in [
            Add::new(site, vector.clone()),
            Replace::new(site, vector.clone()),
            ProjectOut::new(site, &vector).unwrap(),
        ] {
            assert_ne!(with(edit.clone(), 3), plain);
            assert_eq!(with(edit.scaled(0.0).unwrap(), 3), plain, "{}", case.name);
        }
    }
}

#[test]
fn replace_and_project_out_match_their_formulas() {
    let x = pattern(&[1, 4, 3, 2], 1.0, 5); // (B, T, H, D)
    let vector = pattern(&[3, 2], 1.0, 6);
    let site = named_site("z0").unwrap();
    let seen = |edit: Edit| {
        let mut edit = edit;
        assert!(edit.wants(site) && !edit.wants(named_site("z1").unwrap()));
        let seen = edit.observe(site, x.clone()).unwrap();
        assert!(edit.has_changed);
        seen
    };
    let (x64, v64) = (values(&x), values(&vector));
    let replaced = seen(Replace::new(site, vector.clone()));
    assert_eq!(values(&replaced), v64.repeat(4));
    let half = values(&seen(Replace::new(site, vector.clone()).scaled(0.5).unwrap()));
    let length: f64 = v64.iter().map(|v| v * v).sum::<f64>();
    for scale in [1.0, 0.25] {
        let out = values(&seen(ProjectOut::new(site, &vector).unwrap().scaled(scale).unwrap()));
        for (token, (out, x)) in out.chunks(6).zip(x64.chunks(6)).enumerate() {
            let along: f64 = x.iter().zip(&v64).map(|(x, v)| x * v).sum::<f64>() / length;
            for (place, out) in out.iter().enumerate() {
                let expected = x[place] - scale * along * v64[place];
                assert!((out - expected).abs() < 1e-6, "token {token}: {out} for {expected}");
            }
        }
    }
    for ((half, x), v) in half.iter().zip(&x64).zip(v64.iter().cycle()) {
        assert!((half - (x + v) / 2.0).abs() < 1e-6);
    }
    for bad in [0.0, f64::NAN, f64::INFINITY] {
        let direction = (vector.ones_like().unwrap().to_dtype(DType::F64).unwrap() * bad).unwrap();
        assert!(
            ProjectOut::new(site, &direction)
                .unwrap_err()
                .to_string()
                .contains("expected a finite, nonzero length")
        );
    }
}

#[test]
fn projection_keeps_the_precision_of_the_activation() {
    let site = named_site("resid_post0").unwrap();
    let project = |direction: &Tensor, x: Tensor| {
        let mut edit = ProjectOut::new(site, direction).unwrap();
        edit.observe(site, x.unsqueeze(0).unwrap().unsqueeze(0).unwrap()).unwrap() // (B, T, C)
    };
    // A third is not exact in f32, which would leave a remainder of 1e-8.
    let x = Tensor::new(&[1f64, 2., 2.], &Device::Cpu).unwrap();
    let projected = project(&x, x.clone());
    assert_eq!(projected.dtype(), DType::F64);
    assert!(values(&projected).iter().all(|x| x.abs() < 1e-15), "{projected}");
    // In f16, a sum of ones stops at 2048.
    let width = 4096;
    let x = Tensor::full(64f32, width, &Device::Cpu).unwrap().to_dtype(DType::F16).unwrap();
    let projected = project(&x, x.clone());
    assert_eq!(projected.dtype(), DType::F16);
    assert_eq!(values(&projected), vec![0.0; width]);
}
