//! One seeded model in every format, written by the tools that users run.
//!
//! Every file must load as the same model. `scripts/reference/formats.py` writes the fixtures.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, IndexOp, Tensor};
use candle_gpt2::{LogitsFor, Pass};
use candle_gpt2_testing::{
    Fixture, assert_close_absolute, checkpoints, fixture_path, temporary_folder, values,
};
use candle_gpt2_weights::{
    Checkpoint, Format, LoadOptions, OpenOptions, Orientation, WeightDType, WeightsError, load_tokenizer,
};

/// Tolerance between two implementations with the same f32 weights.
const EXACT: f64 = 1e-4;
/// Tolerance for weights with at least 8 significant bits, compared with the f32 model.
const HALF_PRECISION: f64 = 0.1;

fn expected() -> Fixture {
    Fixture::open("formats/expected")
}

fn logits(checkpoint: &Checkpoint) -> Tensor {
    // By default, quantized weights are multiplied with rounded activations.
    let options = LoadOptions { dtype: Some(WeightDType::F32), ..LoadOptions::default() };
    let model = checkpoint.load(&options, &|_| ()).unwrap();
    let ids = expected().tensor("input_ids").to_dtype(DType::U32).unwrap();
    model.forward_with(&ids, LogitsFor::EveryToken, None, &mut Pass::inference()).unwrap()
}

#[track_caller]
fn assert_model(path: &str, format: Format, expected_name: &str, tolerance: f64) -> Checkpoint {
    let checkpoint = Checkpoint::open(fixture_path("formats").join(path)).unwrap();
    assert_eq!(checkpoint.format(), format, "{path}");
    assert_eq!(checkpoint.verify(&|_| ()).unwrap(), [], "{path}");
    assert_close_absolute(&logits(&checkpoint), &expected().tensor(expected_name), tolerance, path);
    checkpoint
}

#[track_caller]
fn assert_rule(checkpoint: &Checkpoint, expected: &str) {
    assert!(
        checkpoint.rules().iter().any(|rule| rule.contains(expected)),
        "{expected}: {:?}",
        checkpoint.rules()
    );
}

#[test]
fn sharded_safetensors_load() {
    let checkpoint = assert_model("safetensors-shards", Format::Safetensors, "model", EXACT);
    assert_eq!(checkpoint.files().count(), 4);
    assert!(checkpoint.evidence().contains("shards"));
    assert_model("safetensors-shards/model.safetensors.index.json", Format::Safetensors, "model", EXACT);
}

/// Loads old `.bin` files with causal masks and a copy of the tied head.
///
/// See huggingface/candle#2666, karpathy/minGPT#120 and huggingface/transformers#24581.
#[test]
fn pytorch_zip_and_legacy_files_load() {
    for (folder, format) in [("pytorch-zip", Format::PyTorchZip), ("pytorch-legacy", Format::PyTorchLegacy)] {
        let checkpoint = assert_model(folder, format, "model", EXACT);
        assert_eq!(checkpoint.buffers().count(), 4, "{folder}");
        assert_eq!(checkpoint.tied_head().unwrap().name, "lm_head.weight", "{folder}");
        assert_eq!(checkpoint.prefix(), "transformer.", "{folder}");
    }
}

#[test]
fn sharded_pytorch_files_load() {
    let checkpoint = assert_model("pytorch-shards", Format::PyTorchZip, "model", EXACT);
    assert_eq!(checkpoint.files().count(), 2);
}

#[test]
fn half_precision_transposed_pytorch_views_load() {
    let checkpoint = assert_model("pytorch-views", Format::PyTorchZip, "model", HALF_PRECISION);
    assert_rule(&checkpoint, "under the key `state_dict`");
}

/// Loads OpenAI's own files without TensorFlow: rasbt/LLMs-from-scratch#272 and #754.
#[test]
fn tensorflow_checkpoint_loads() {
    let checkpoint = assert_model("tensorflow", Format::TensorFlow, "model", EXACT);
    assert_rule(&checkpoint, "hparams.json");
    assert_eq!(checkpoint.naming_scheme(), "OpenAI");
    assert_model("tensorflow/model.ckpt", Format::TensorFlow, "model", EXACT);
    assert_model("tensorflow/model.ckpt.index", Format::TensorFlow, "model", EXACT);
    let tokenizer = checkpoint.tokenizer(None).unwrap();
    let text = "The first citizen 🤗";
    let ids = tokenizer.encode(text, true).unwrap().get_ids().to_vec();
    let reference = load_tokenizer(fixture_path("tiny-checkpoint")).unwrap();
    assert_eq!(ids, reference.encode(text, true).unwrap().get_ids());
}

/// Loads nanoGPT files with the prefix from `torch.compile`, no biases and a padded vocabulary.
///
/// See karpathy/nanoGPT#272 and #169, and karpathy/build-nanogpt#95.
#[test]
fn nanogpt_checkpoint_loads() {
    let checkpoint = assert_model("nanogpt", Format::PyTorchZip, "nanogpt", EXACT);
    assert_eq!(checkpoint.prefix(), "_orig_mod.transformer.");
    assert_eq!(checkpoint.orientation(), Orientation::Linear);
    assert_eq!(checkpoint.config().activation_function, candle_gpt2::Activation::Gelu);
    assert_rule(&checkpoint, "biases are not stored and are set to zero");
    assert_rule(&checkpoint, "the configuration comes from nanoGPT's model_args");
}

#[test]
fn llm_c_checkpoints_load() {
    let checkpoint = assert_model("llmc/gpt2.bin", Format::LlmC, "model", EXACT);
    assert_rule(&checkpoint, "the last 84 rows of the token embedding are padding and are ignored");
    assert_eq!(checkpoint.config().vocab_size, 300);
    assert_model("llmc/gpt2_bf16.bin", Format::LlmC, "model", HALF_PRECISION);
}

#[test]
fn book_checkpoint_loads() {
    let checkpoint = assert_model("book", Format::PyTorchZip, "book", EXACT);
    assert_rule(&checkpoint, "the head dimension is assumed to be 64");
    assert_rule(&checkpoint, "1 biases are not stored and are set to zero");
    assert_eq!(checkpoint.buffers().count(), 1);
}

/// The book's files do not contain the number of heads, and every divisor of the width is valid.
#[test]
fn unrecorded_head_count_is_guessed_or_specified() {
    let open = |name: &str, n_head| {
        Checkpoint::open_with(fixture_path("formats").join(name), &OpenOptions { n_head })
    };
    let guessed = open("book", None).unwrap();
    let note = guessed.guessed_heads_note().unwrap();
    assert!(note.contains("assuming 1 with head dimension 64"), "{note}");

    let named = open("book", Some(4)).unwrap();
    assert_eq!((named.config().n_head, named.config().head_dim()), (4, 16));
    assert_eq!(named.guessed_heads_note(), None);
    assert_rule(&named, "the number of heads, 4, was specified");
    assert_ne!(values(&logits(&named)), values(&logits(&guessed)), "another model");

    let wrong = open("book", Some(5)).unwrap_err().to_string();
    assert!(wrong.contains("`n_head` = 5 does not divide `n_embd` = 64"), "{wrong}");
    let zero = open("book", Some(0)).unwrap_err().to_string();
    assert!(zero.contains("`n_head`: expected a whole number from 1"), "{zero}");

    let recorded = open("pytorch-zip", None).unwrap();
    assert_eq!(recorded.guessed_heads_note(), None);
    let n_head = recorded.config().n_head;
    assert_eq!(open("pytorch-zip", Some(n_head)).unwrap().config(), recorded.config());
    let other = open("pytorch-zip", Some(n_head + 1)).unwrap_err();
    assert!(
        matches!(other, WeightsError::OtherHeads { configured, requested, .. } if (configured, requested) == (n_head, n_head + 1))
    );
}

/// If a head size of 64 does not divide the width, the number of heads is not guessed.
#[test]
fn unguessable_head_count_must_be_specified() {
    let folder = temporary_folder();
    let path = folder.path().join("model.safetensors");
    let sizes = [
        ("tok_emb.weight", vec![61, 24]),
        ("pos_emb.weight", vec![19, 24]),
        ("trf_blocks.0.norm1.scale", vec![24]),
    ];
    let mut tensors: HashMap<String, Tensor> = sizes
        .into_iter()
        .map(|(name, shape)| (name.to_owned(), Tensor::ones(shape, DType::F32, &Device::Cpu).unwrap()))
        .collect();
    let expand = Tensor::ones((96, 24), DType::F32, &Device::Cpu).unwrap();
    tensors.insert("trf_blocks.0.ff.layers.0.weight".to_owned(), expand);
    candle_core::safetensors::save(&tensors, &path).unwrap();
    let error = Checkpoint::open(&path).unwrap_err();
    assert!(matches!(error, WeightsError::UnknownHeads { n_embd: 24, .. }), "{error}");
    let config = Checkpoint::open_with(&path, &OpenOptions { n_head: Some(3) }).unwrap().config().clone();
    assert_eq!((config.n_head, config.n_layer, config.vocab_size, config.n_inner), (3, 1, 61, Some(96)));
}

/// Compares every block type with the dequantization in llama.cpp's own Python package.
///
/// `output.weight` may be missing, and `n_inner` comes from the tensors: ggml-org/llama.cpp#12567 and #4073.
#[test]
fn every_gguf_type_loads() {
    for name in ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k"] {
        let checkpoint =
            assert_model(&format!("gguf/{name}.gguf"), Format::Gguf, &format!("gguf.{name}"), EXACT);
        assert_rule(&checkpoint, "the tokenizer comes from the weights file");
        let tokenizer = checkpoint.tokenizer(None).unwrap();
        let text = "The first citizen, naïve 🤗";
        let reference = load_tokenizer(fixture_path("tiny-checkpoint")).unwrap();
        let expected = reference.encode(text, true).unwrap().get_ids().to_vec();
        assert_eq!(tokenizer.encode(text, true).unwrap().get_ids(), expected, "{name}");
    }
    let half_precision = Checkpoint::open(fixture_path("formats/gguf/f16.gguf")).unwrap();
    assert_close_absolute(&logits(&half_precision), &expected().tensor("model"), HALF_PRECISION, "f16");
}

/// The file published in 2022 and its conversion contain the same model.
#[test]
fn published_tarotble_pickle_equals_its_safetensors() {
    let Some(folder) = checkpoints() else { return };
    let open = |name: &str| Checkpoint::open(folder.join("tarotble").join(name)).unwrap();
    let ids = Tensor::new(&[[5u32, 299, 0, 17, 130]], &Device::Cpu).unwrap();
    let logits = |checkpoint: &Checkpoint| {
        let model = checkpoint.load(&LoadOptions::default(), &|_| ()).unwrap();
        values(
            &model
                .forward_with(&ids, LogitsFor::EveryToken, None, &mut Pass::inference())
                .unwrap()
                .i(0)
                .unwrap(),
        )
    };
    let pickle = open("pytorch_model.bin");
    assert_eq!(pickle.buffers().count(), 8);
    assert_eq!(logits(&pickle), logits(&open("model.safetensors")));
}

/// The content determines the format, whatever the file name: huggingface/candle#1104.
#[test]
fn format_detection_ignores_file_names() {
    let folder = temporary_folder();
    let formats = fixture_path("formats");
    for (from, format) in [
        ("pytorch-zip/pytorch_model.bin", Format::PyTorchZip),
        ("pytorch-legacy/pytorch_model.bin", Format::PyTorchLegacy),
        ("gguf/q4_0.gguf", Format::Gguf),
        ("llmc/gpt2.bin", Format::LlmC),
    ] {
        let copy = folder.path().join("model.safetensors");
        std::fs::copy(formats.join(from), &copy).unwrap();
        std::fs::copy(formats.join("pytorch-zip/config.json"), folder.path().join("config.json")).unwrap();
        let open = |path: &Path| Checkpoint::open(path).unwrap().format();
        assert_eq!((open(&copy), open(folder.path())), (format, format), "{from}");
    }
}
