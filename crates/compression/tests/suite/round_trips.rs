//! Every input is restored, and its compressed size matches the model's predictions.

use candle_gpt2_arithmetic::RandomStream;
use candle_gpt2_compression::Compressor;
use candle_gpt2_engine::{ModelOptions, Silent, WeightDType};
use candle_gpt2_generation::{default_stride, score};
use candle_gpt2_kernels::KvDType;

use crate::{BUILT_IN, MODEL_CARD, README, TINY, compressed, decompressed, load};

/// File overhead: a header with the name `tiny`, one group with one stream, and the end marker.
const FORMAT_BYTES: usize = 64;
/// Maximum length of the random inputs.
const MAX_LENGTH: u64 = 5000;

/// Random bytes, words, markup, or a mixture.
fn input(random: &mut RandomStream, length: usize) -> Vec<u8> {
    const WORDS: [&str; 8] =
        ["the", " citizen", " and", "\n", " of", " ord\u{e9}al", " \u{4e16}\u{754c}", "  "];
    const MARKUP: [&str; 8] =
        ["<p>", "</p>\r\n", "<|endoftext|>", " class=\"a\"", "&amp;", "{\"a\": [1, ", "]}", "\t"];
    let mut bytes = Vec::new();
    let kind = random.below(4);
    while bytes.len() < length {
        let choice = usize::try_from(random.below(8)).unwrap();
        match if kind == 3 { random.below(3) } else { kind } {
            0 => bytes.extend(random.seed().to_le_bytes()),
            1 => bytes.extend(WORDS[choice].as_bytes()),
            _ => bytes.extend(MARKUP[choice].as_bytes()),
        }
    }
    // The input may end in the middle of a character.
    bytes.truncate(length);
    bytes
}

#[test]
fn random_inputs_round_trip() {
    let mut random = RandomStream::new(1);
    let compressors =
        [None, Some(2), Some(17)].map(|context| Compressor::new(&TINY, "tiny", context).unwrap());
    let mut coded = 0;
    for round in 0..200 {
        // Every length below 40, then random lengths up to the maximum.
        let length = if round < 40 { round } else { usize::try_from(random.below(MAX_LENGTH + 1)).unwrap() };
        let bytes = input(&mut random, length);
        let (file, _) = compressed(&compressors[round % 3], &bytes);
        assert!(file.len() <= bytes.len() + FORMAT_BYTES, "{round}: {} of {length}", file.len());
        coded += usize::from(file.len() < length);
        assert!(decompressed(&TINY, &file).unwrap() == bytes, "{round}: {length} bytes");
    }
    assert!(coded > 60, "only {coded} inputs are compressed instead of stored");
}

#[test]
fn edge_case_inputs_round_trip() {
    let all_bytes: Vec<u8> = (0..=u8::MAX).collect();
    let inputs: [&[u8]; 10] = [
        b"",
        b"\0",
        b"\xff",
        b"<|endoftext|>",
        b"<|endoftext|><|endoftext|>a",
        "\u{feff}\u{1f600}\u{301}".as_bytes(),
        "\u{e9}".as_bytes().split_last().unwrap().1,
        b"\r\n \r\n\t",
        &[0x80; 70],
        &all_bytes,
    ];
    for model in [&*TINY, &*BUILT_IN] {
        let compressor = Compressor::new(model, "", None).unwrap();
        for bytes in inputs {
            assert_eq!(decompressed(model, &compressed(&compressor, bytes).0).unwrap(), bytes);
        }
    }
}

/// A text that spells a special token is encoded as characters, never as the special token.
#[test]
fn special_token_text_is_encoded_as_characters() {
    let end = TINY.config().eos_token_id[0];
    let sizes = Compressor::new(&TINY, "", None).unwrap().token_sizes(b"a<|endoftext|>b", &Silent).unwrap();
    assert!(sizes.len() > 3 && sizes.iter().all(|size| size.id != end), "{sizes:?}");
    let bytes: Vec<u8> = sizes.into_iter().flat_map(|size| size.bytes).collect();
    assert_eq!(bytes, b"a<|endoftext|>b");
}

/// Tests several streams in one or more groups, decoded in a batch and ending at different steps.
#[test]
fn long_inputs_round_trip_in_several_streams() {
    let text = format!("{README}{MODEL_CARD}").repeat(200);
    let lengths = [(64 << 10) - 1, 64 << 10, (1 << 20) + 5];
    let compressor = Compressor::new(&TINY, "tiny", Some(12)).unwrap();
    for length in lengths {
        let bytes = &text.as_bytes()[..length];
        let (file, _) = compressed(&compressor, bytes);
        assert!(file.len() < length, "{} of {length}", file.len());
        assert!(decompressed(&TINY, &file).unwrap() == bytes, "{length}");
    }
}

/// Text to which compression and scoring with a q8 model assign the same token probabilities.
///
/// In other texts, rounding changes the probabilities of a few tokens by a relative 1e-4.
const SCORED: &str = include_str!("../scored.txt");

/// A file exceeds the cross-entropy of the same windows by at most 2% plus the format's overhead.
#[test]
fn file_size_is_close_to_the_cross_entropy() {
    let text = SCORED;
    // Scoring uses keys and values in full precision.
    let model = load(&ModelOptions {
        dtype: Some(WeightDType::Q8),
        kv_dtype: Some(KvDType::F32),
        ..ModelOptions::default()
    });
    let compressor = Compressor::new(&model, "built-in", None).unwrap();
    let (file, summary) = compressed(&compressor, text.as_bytes());
    let sizes = compressor.token_sizes(text.as_bytes(), &Silent).unwrap();
    let start = model.config().start_token().unwrap();
    let ids: Vec<u32> = std::iter::once(start).chain(sizes.iter().map(|size| size.id)).collect();
    assert!(ids.len() > 3 * model.config().n_positions, "several windows");
    let scored = score(model.model(), &ids, default_stride(model.config()), 0, &|_| ()).unwrap();
    let bits = scored.loss / std::f64::consts::LN_2 * (ids.len() - 1) as f64;
    for (index, size) in sizes.iter().enumerate() {
        let expected = -scored.logprobs[index + 1].unwrap() / std::f64::consts::LN_2;
        // Exponentials are rounded to 2⁻³⁰ of the largest, and every token has one extra unit of 2⁻³².
        let difference = (-size.bits).exp2() - (-expected).exp2();
        assert!(difference.abs() < 2e-9 + 1e-6 * (-expected).exp2(), "{index}: {} for {expected}", size.bits);
    }
    let tokens: f64 = sizes.iter().map(|size| size.bits).sum();
    assert!((summary.model_bits - tokens).abs() < 1e-6 * tokens);
    let max_bytes = 1.02 * bits / 8.0 + FORMAT_BYTES as f64;
    assert!((file.len() as f64) < max_bytes, "{} bytes, expected at most {max_bytes}", file.len());
}
