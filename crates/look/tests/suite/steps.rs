//! Tests of head steps against recorded activations, and of next tokens against the sampler.

use candle_core::IndexOp;
use candle_gpt2::{Site, SiteKind};
use candle_gpt2_engine::LoadedModel;
use candle_gpt2_generation::{AllowedTokens, GenerationConfig, History, LogitsProcessor};
use candle_gpt2_interpret::Head;
use candle_gpt2_look::{
    Activations, HeadSteps, LookSubject, NextTokens, Numbers, OneHead, PrefixCache, Text,
};
use candle_gpt2_testing::values;

use crate::common::{Case, built_in, reader, words};

/// Tolerance for sums of products computed in a different order.
const SUMS: f64 = 1e-4;

fn steps(loaded: &LoadedModel, text: Text, head: Head, query: i64, key: i64) -> HeadSteps {
    let reader = reader(loaded);
    let checked = OneHead { text, head, query, key }.check(&reader).unwrap();
    checked.look(&LookSubject::new(loaded, "a model".into(), &reader)).unwrap()
}

#[test]
fn steps_equal_the_recorded_activations() {
    let loaded = built_in();
    let reader = reader(&loaded);
    let subject = LookSubject::new(&loaded, "a model".into(), &reader);
    let (layer, head, query, key) = (2, 1, 6, 3);
    let text = words("The dog sat on the mat, and the cat");
    let found = steps(&loaded, text.clone(), Head { layer, head }, query as i64, key as i64);

    let kinds = [SiteKind::Q, SiteKind::K, SiteKind::V, SiteKind::AttnScores, SiteKind::Pattern, SiteKind::Z];
    let sites: Vec<Site> = kinds.map(|kind| Site::in_block(layer, kind)).into();
    let activations = Activations { text, sites, layers: None, positions: None, numbers: Numbers::Raw };
    let cached = activations.cached(&activations.check(&reader).unwrap(), &subject).unwrap();
    let of = |kind| &cached.tensors[&Site::in_block(layer, kind).to_string()];
    let of_token = |kind, token: usize| values(&of(kind).i((0, token, head)).unwrap());
    let of_keys = |kind| values(&of(kind).i((0, head, query, ..=query)).unwrap());
    let close = |name: &str, found: &[f32], expected: Vec<f64>| {
        assert_eq!(found.len(), expected.len(), "{name}");
        let alike = |(found, expected): (&f32, &f64)| (f64::from(*found) - expected).abs() < SUMS;
        assert!(found.iter().zip(&expected).all(alike), "{name}: {found:?} {expected:?}");
    };
    close("q", &found.q, of_token(SiteKind::Q, query));
    close("k", &found.k, of_token(SiteKind::K, key));
    close("v", &found.v, of_token(SiteKind::V, key));
    close("context", &found.context, of_token(SiteKind::Z, query));
    close("scores", &found.scores, of_keys(SiteKind::AttnScores));
    close("weights", &found.weights, of_keys(SiteKind::Pattern));

    assert_eq!(found.tokens.len(), cached.tokens.len(), "including tokens after the query");
    assert_eq!(
        (found.layer, found.head, found.query, found.key, found.head_dim),
        (layer, head, query, key, 64)
    );
    assert!((found.scale - 1.0 / 64_f64.sqrt()).abs() < 1e-12);
}

/// Recomputes each step from the previous one.
#[test]
fn each_step_follows_from_the_previous_one() {
    let loaded = built_in();
    let text = || words("The dog sat on the mat");
    let head = Head { layer: 1, head: 0 };
    let last = steps(&loaded, text(), head, -1, 2);
    let sum: f32 = last.products.iter().sum();
    assert!((sum - last.score).abs() < 1e-4 && last.products[3] == last.q[3] * last.k[3]);
    assert!((f64::from(last.score) * last.scale - f64::from(last.scaled)).abs() < SUMS);
    assert_eq!(last.scaled, last.scores[2]);
    let largest = last.scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f32 = last.scores.iter().map(|score| (score - largest).exp()).sum();
    for (score, weight) in last.scores.iter().zip(&last.weights) {
        assert!(((score - largest).exp() / total - weight).abs() < 1e-5, "{score} {weight}");
    }
    let mut context = vec![0.0; last.head_dim];
    for (key, weight) in last.weights.iter().enumerate() {
        let v = steps(&loaded, text(), head, -1, key as i64).v;
        context.iter_mut().zip(v).for_each(|(sum, v)| *sum += weight * v);
    }
    assert!(context.iter().zip(&last.context).all(|(sum, found)| (sum - found).abs() < 1e-4));
    // The first token attends only to itself.
    let first = steps(&loaded, text(), head, 0, 0);
    assert_eq!((first.weights.as_slice(), &first.context), (&[1.0][..], &first.v));
}

#[test]
fn out_of_range_steps_are_rejected() {
    let loaded = built_in();
    let reader = reader(&loaded);
    let check = |layer, head, query, key| {
        let head = Head { layer, head };
        OneHead { text: Text::Ids(vec![1, 2, 3]), head, query, key }.check(&reader).map(|_| ())
    };
    assert!(check(0, 0, 2, 2).is_ok() && check(5, 2, -3, -3).is_ok());
    for (layer, head, query, key, expected) in [
        (7, 0, 0, 0, "head 7.0 is out of range"),
        (0, 4, 0, 0, "head 0.4 is out of range"),
        (0, 0, 3, 0, "`query` 3: the text has 3 tokens"),
        (0, 0, 1, -4, "`key` -4: the text has 3 tokens"),
        (0, 0, 1, 2, "`key` 2: token 1 attends only to itself and earlier tokens"),
    ] {
        let error = check(layer, head, query, key).unwrap_err();
        assert!(error.is_usage() && error.to_string().contains(expected), "{error}");
    }
}

fn next(logits: &[f32], ids: &[u32], config: &GenerationConfig, others: &[LogitsProcessor]) -> NextTokens {
    let history = History { ids, prompt_len: 2 };
    NextTokens::of(logits, history, config, others, 4, |id| format!("of {id}")).unwrap()
}

#[test]
fn probabilities_follow_the_sampling_settings() {
    // The first token has about half the probability.
    let logits = [3.0, 1.0, 2.0, 2.0, -1.0, f32::NEG_INFINITY];
    let exps: Vec<f64> = logits.iter().map(|logit| f64::from(*logit).exp()).collect();
    let sum: f64 = exps.iter().sum();
    let plain = GenerationConfig { do_sample: true, top_k: 0, ..GenerationConfig::default() };
    let found = next(&logits, &[7, 8], &plain, &[]);
    let ids: Vec<u32> = found.tokens.iter().map(|token| token.id).collect();
    assert_eq!(
        (ids.as_slice(), found.kept),
        (&[0, 2, 3, 1][..], 5),
        "ties list the lower id first; impossible tokens are dropped"
    );
    for token in &found.tokens {
        let expected = exps[token.id as usize] / sum;
        assert!(
            (token.probability - expected).abs() < 1e-9 && (token.logprob - expected.ln()).abs() < 1e-6,
            "{token:?}"
        );
        assert_eq!((token.logit, &token.token), (logits[token.id as usize], &format!("of {}", token.id)));
    }

    let shares = |config: &GenerationConfig| -> (Vec<f64>, usize) {
        let found = next(&logits, &[7, 8], config, &[]);
        (found.tokens.iter().map(|token| token.probability).collect(), found.kept)
    };
    let e = 1_f64.exp();
    let close = |found: (Vec<f64>, usize), expected: [f64; 4], kept: usize| {
        assert_eq!(found.1, kept);
        assert!(
            found.0.iter().zip(expected).all(|(found, expected)| (found - expected).abs() < 1e-6),
            "{found:?}"
        );
    };
    // All tokens tied at the cutoff are kept.
    close(
        shares(&GenerationConfig { top_k: 2, ..plain.clone() }),
        [e / (e + 2.0), 1.0 / (e + 2.0), 1.0 / (e + 2.0), 0.0],
        3,
    );
    close(shares(&GenerationConfig { top_p: 0.3, ..plain.clone() }), [1.0, 0.0, 0.0, 0.0], 1);
    let cold = (2_f64).exp();
    let half = GenerationConfig { temperature: 0.5, top_k: 2, ..plain.clone() };
    close(shares(&half), [cold / (cold + 2.0), 1.0 / (cold + 2.0), 1.0 / (cold + 2.0), 0.0], 3);
    let greedy = GenerationConfig { do_sample: false, ..plain.clone() };
    close(shares(&greedy), [1.0, 0.0, 0.0, 0.0], 1);
    close(shares(&GenerationConfig { repetition_penalty: 1e3, ..greedy.clone() }), [1.0, 0.0, 0.0, 0.0], 1);

    // Settings do not change the model's own logits.
    let penalized =
        next(&logits, &[7, 8, 0], &GenerationConfig { presence_penalty: 2.0, ..greedy.clone() }, &[]);
    assert_eq!(
        (penalized.tokens[0].logit, penalized.tokens[0].probability, penalized.tokens[1].probability),
        (3.0, 0.0, 1.0)
    );
    let prompt_only = next(&logits, &[0, 8], &GenerationConfig { presence_penalty: 2.0, ..greedy }, &[]);
    assert_eq!(prompt_only.tokens[0].probability, 1.0, "the prompt is not penalized");
    let allowed = [LogitsProcessor::AllowedTokens(AllowedTokens::new(|_| vec![1, 4]))];
    let only = next(&logits, &[7, 8], &plain, &allowed);
    let shares: Vec<f64> = only.tokens.iter().map(|token| token.probability).collect();
    assert!(
        only.kept == 2 && shares[..3] == [0.0; 3] && (shares[3] - cold / (cold + 1.0)).abs() < 1e-6,
        "{only:?}"
    );
}

#[test]
fn non_finite_logits_are_rejected() {
    let config = GenerationConfig::default();
    let history = History { ids: &[1], prompt_len: 1 };
    for logits in [[1.0, f32::NAN], [1.0, f32::INFINITY], [f32::NEG_INFINITY; 2]] {
        assert!(
            NextTokens::of(&logits, history, &config, &[], 1, |id| id.to_string()).is_err(),
            "{logits:?}"
        );
    }
}

/// Covers caches filled with the same text, a longer one, a shorter one and a different one.
#[test]
fn prefix_cache_returns_the_logits_of_the_text() {
    for loaded in [built_in(), Case::open("untied").loaded] {
        let config = loaded.config();
        let (vocab_size, longest) = (u32::try_from(config.vocab_size).unwrap(), config.n_positions.min(200));
        let ids: Vec<u32> = (0..).take(longest).map(|n: u32| (n * n + 3) % vocab_size).collect();
        let mut other = ids[..12].to_vec();
        other[5] = (other[5] + 1) % vocab_size;
        let mut cache = PrefixCache::default();
        for (text, at) in [
            (&ids[..5], 4),
            (&ids[..5], 0),
            (&ids[..11], 10),
            (&ids[..11], 7),
            (&ids[..3], 2),
            (&other[..], 11),
            (&ids[..], longest - 1),
            (&ids[1..4], 1),
        ] {
            let found = cache.logits(loaded.model(), text, at).unwrap();
            let expected = PrefixCache::default().logits(loaded.model(), text, at).unwrap();
            assert_eq!(found, expected, "{} tokens at {at}", text.len());
            let run = candle_gpt2_interpret::Run::new(loaded.model(), text).unwrap();
            let logits = run
                .logits(candle_gpt2::LogitsFor::EveryToken, &mut candle_gpt2_interpret::Chain(Vec::new()))
                .unwrap();
            let row = values(&logits.i((0, at)).unwrap());
            let largest = found.iter().zip(&row).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
            assert!(found.len() == row.len() && largest < SUMS, "{largest}");
        }
        assert!(cache.logits(loaded.model(), &ids[..3], 3).is_err());
        let again = cache.logits(loaded.model(), &ids[..3], 2).unwrap();
        assert_eq!(
            again,
            PrefixCache::default().logits(loaded.model(), &ids[..3], 2).unwrap(),
            "an error leaves the cache consistent"
        );
    }
}
