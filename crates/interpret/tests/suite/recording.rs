//! A recording made a few tokens at a time equals the record of the whole sequence.

use candle_core::DType;
use candle_gpt2::{Site, SiteKind};
use candle_gpt2_interpret::{Head, InterpretError, Patterns, Recording, Run, residual_sites};
use candle_gpt2_testing::assert_close;

use crate::common::Case;
use crate::graphs::{seeded, small};

/// Tolerance for f32 sums computed in a different order.
const SAME: f64 = 2e-5;
/// Tolerance for f64 sums computed in a different order.
const SAME_F64: f64 = 1e-12;

#[test]
fn recording_in_chunks_equals_the_whole_sequence() {
    for case in Case::all() {
        let n_layer = case.model.config().n_layer;
        let of_heads = [SiteKind::Pattern, SiteKind::Z].map(|kind| Site::in_block(n_layer - 1, kind));
        let sites: Vec<Site> = residual_sites(n_layer).chain(of_heads).collect();
        let whole = case.clean().record(sites.iter().copied()).unwrap();
        for tokens in [1, 3, 1000] {
            let mut recording = Recording::new(&case.model, case.clean.clone(), sites.clone()).unwrap();
            let mut parts = 0;
            while !recording.is_complete() {
                recording.advance(&case.model, tokens).unwrap();
                parts += 1;
            }
            assert_eq!(parts, case.clean.len().div_ceil(tokens));
            let record = recording.into_record().unwrap();
            for site in &sites {
                let (found, expected) = (record.get(*site).unwrap(), whole.get(*site).unwrap());
                assert_eq!(found.dims(), expected.dims(), "{}: {site}", case.name);
                assert_close(found, expected, SAME, &format!("{}: {site}", case.name));
            }
        }
    }
}

#[test]
fn recording_in_chunks_keeps_f64_precision() {
    let (model, ids, site) =
        (seeded(&small(), DType::F64), vec![3, 1, 4, 1, 5], Site::in_block(2, SiteKind::Z));
    let whole = Run::new(&model, &ids).unwrap().record([site]).unwrap();
    let mut recording = Recording::new(&model, ids, vec![site]).unwrap();
    while !recording.is_complete() {
        recording.advance(&model, 2).unwrap();
    }
    let record = recording.into_record().unwrap();
    assert_close(record.get(site).unwrap(), whole.get(site).unwrap(), SAME_F64, "in chunks of two");
}

#[test]
fn recording_rejects_invalid_token_sequences() {
    let case = Case::open("plain");
    let too_long = vec![0; case.model.config().n_positions + 1];
    for (ids, is_expected) in [
        (Vec::new(), (|error| matches!(error, InterpretError::Length { tokens: 0, .. })) as fn(_) -> _),
        (too_long, |error| matches!(error, InterpretError::Length { .. })),
        (vec![u32::MAX], |error| matches!(error, InterpretError::UnknownToken { id: u32::MAX, .. })),
    ] {
        let error = Recording::new(&case.model, ids, Vec::new()).unwrap_err();
        assert!(is_expected(error));
    }
}

#[test]
fn patterns_of_selected_heads_equal_the_record() {
    let case = Case::open("plain");
    let run = case.clean();
    let heads = [Head { layer: 1, head: 0 }, Head { layer: 0, head: 2 }];
    let patterns = Patterns::of(run.record(Patterns::sites(&heads)).unwrap(), &heads).unwrap();
    assert_eq!((&patterns.layers[..], &patterns.heads[..]), (&[0, 1][..], &[0, 2][..]));
    let tokens = run.ids.len();
    let site = |layer| Site::in_block(layer, SiteKind::Pattern);
    let record = run.record([site(0), site(1)]).unwrap();
    let mut entries = patterns.values.iter();
    for (layer, head) in [(0, 0), (0, 2), (1, 0), (1, 2)] {
        let weights = record.get(site(layer)).unwrap().get(0).unwrap().get(head).unwrap();
        let weights = weights.to_vec2::<f32>().unwrap();
        for (query, row) in weights.iter().enumerate() {
            for (key, weight) in row.iter().enumerate() {
                let is_selected = heads.contains(&Head { layer, head }) && key <= query;
                assert_eq!(
                    *entries.next().unwrap(),
                    is_selected.then_some(*weight),
                    "{layer}.{head} {query} {key}"
                );
            }
        }
    }
    assert_eq!((entries.next(), tokens > 3), (None, true));
    assert_eq!(
        Run::new(&case.model, &case.clean).unwrap().residuals().unwrap().len(),
        case.model.config().n_layer + 1
    );
}
