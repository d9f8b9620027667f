//! Checkpoints with heads for labels or choices: detection, comparison and conversion.
//!
//! `scripts/reference/heads.py` writes the fixtures.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_gpt2::{HeadKind, ParameterCounts, ProblemType};
use candle_gpt2_testing::{CheckpointFolder, fixture_path, temporary_folder, worst};
use candle_gpt2_weights::{
    Checkpoint, DifferenceKind, LoadOptions, Problem, WeightsError, WrittenDType, differences,
    load_tokenizer, write_gguf, write_hugging_face,
};
use serde_json::json;

/// Fixture folders and their heads.
const HEADS: [(&str, HeadKind); 5] = [
    ("sequence", HeadKind::SequenceClassification),
    ("multi_label", HeadKind::SequenceClassification),
    ("pytorch-shards", HeadKind::SequenceClassification),
    ("token", HeadKind::TokenClassification),
    ("double", HeadKind::DoubleHeads),
];

fn folder(name: &str) -> CheckpointFolder {
    CheckpointFolder::of(&format!("heads/{name}"))
}

fn open(path: &Path) -> Checkpoint {
    Checkpoint::open(path).unwrap()
}

fn problems(folder: &CheckpointFolder) -> Vec<String> {
    open(folder.path()).verify(&|_| ()).unwrap().iter().map(Problem::to_string).collect()
}

/// Renames all tensors.
fn renamed(tensors: &mut HashMap<String, Tensor>, name: impl Fn(&str) -> String) {
    let all: Vec<_> = tensors.drain().map(|(old, tensor)| (name(&old), tensor)).collect();
    tensors.extend(all);
}

#[test]
fn heads_are_detected_by_class_or_tensors() {
    for (name, kind) in HEADS {
        let plain = folder(name);
        let without_class = folder(name).with_config(json!({"architectures": null}));
        for folder in [plain, without_class] {
            let checkpoint = open(folder.path());
            let config = checkpoint.config();
            assert_eq!(config.head, kind, "{name}");
            checkpoint.check().unwrap();
            assert!(problems(&folder).is_empty(), "{name}: {:?}", problems(&folder));
            assert_eq!(checkpoint.stored_parameter_count(), ParameterCounts::new(config).unique, "{name}");
            assert!(checkpoint.rules().iter().any(|rule| rule.ends_with(kind.class_name())), "{name}");
        }
    }
    let sequence = open(folder("sequence").path());
    assert_eq!(sequence.config().id2label, ["red", "green", "naïve café", "blue", "LABEL_4"]);
    assert_eq!(sequence.config().pad_token_id, Some(0));
    let multi_label = open(folder("multi_label").path());
    assert_eq!(multi_label.config().problem(), ProblemType::MultiLabelClassification);
    // Three causal masks and their three fill values are buffers, not parameters.
    assert_eq!(open(folder("pytorch-shards").path()).buffers().count(), 6);
}

#[test]
fn prefixes_are_detected_in_models_with_heads() {
    for (name, kind) in HEADS.into_iter().filter(|(name, _)| *name != "pytorch-shards") {
        let original = open(&fixture_path("heads").join(name));
        let without = |old: &str| old.trim_start_matches("transformer.").to_owned();
        let wrapped = |old: &str| format!("module.{old}");
        for (prefix, change) in [("", &without as &dyn Fn(&str) -> String), ("module.transformer.", &wrapped)]
        {
            let folder = folder(name)
                .with_config(json!({"architectures": null}))
                .with_tensors(|tensors| renamed(tensors, change));
            let checkpoint = open(folder.path());
            assert_eq!((checkpoint.prefix(), checkpoint.config().head), (prefix, kind), "{name}");
            checkpoint.check().unwrap();
            assert!(differences(&original, &checkpoint, &|_| ()).unwrap().is_empty(), "{name}");
        }
    }
}

#[test]
fn damaged_heads_are_reported() {
    let cases: [(&str, &str, &str); 3] = [
        ("sequence", "score.weight", "tensor `score.weight` is missing: expected shape (5, 24)"),
        ("token", "classifier.bias", "tensor `classifier.bias` is missing: expected shape (7)"),
        (
            "double",
            "multiple_choice_head.summary.weight",
            "tensor `multiple_choice_head.summary.weight` is missing: expected shape (1, 24)",
        ),
    ];
    for (name, tensor, expected) in cases {
        let missing = folder(name).with_tensors(|tensors| _ = tensors.remove(tensor).unwrap());
        assert_eq!(problems(&missing), [expected]);
        let nan = folder(name).with_tensors(|tensors| {
            let shape = tensors[tensor].shape().clone();
            tensors.insert(tensor.into(), Tensor::full(f32::NAN, shape, &Device::Cpu).unwrap());
        });
        let found = problems(&nan);
        assert!(found.len() == 1 && found[0].contains(&format!("`{tensor}`")), "{found:?}");
        assert!(found[0].contains("are NaN"), "{found:?}");
        let integers = folder(name).with_tensors(|tensors| {
            let whole = tensors[tensor].to_dtype(DType::I64).unwrap();
            tensors.insert(tensor.into(), whole);
        });
        let expected = format!("tensor `{tensor}`: expected dtype F32, F16, BF16 or F64, found I64");
        assert_eq!(problems(&integers), [expected]);
    }
    let transposed = folder("sequence").with_tensors(|tensors| {
        let transposed = tensors["score.weight"].t().unwrap().contiguous().unwrap();
        tensors.insert("score.weight".into(), transposed);
    });
    assert_eq!(problems(&transposed), ["tensor `score.weight`: expected shape (5, 24), found (24, 5)"]);
    // Tensors for another class are surplus: a language model head, or labels in a language model.
    let with_head = |name: &str| {
        folder(name).with_tensors(|tensors| {
            let head = tensors["transformer.wte.weight"].affine(2.0, 0.0).unwrap();
            tensors.insert("lm_head.weight".into(), head);
        })
    };
    let unexpected = "tensor `lm_head.weight` of shape (300, 24) is not a parameter of the model";
    assert_eq!(problems(&with_head("sequence")), [unexpected]);
    let found = problems(&with_head("double"));
    assert!(found.len() == 1 && found[0].contains("config.json ties"), "{found:?}");
    let language_model = folder("token").with_config(json!({"architectures": ["GPT2LMHeadModel"]}));
    let found = problems(&language_model);
    assert!(
        found.len() == 2 && found.iter().all(|problem| problem.contains("is not a parameter")),
        "{found:?}"
    );
}

#[test]
fn label_count_mismatch_reports_both_counts() {
    let four = json!({"id2label": {"0": "a", "1": "b", "2": "c", "3": "d"}, "label2id": null});
    let expected = "tensor `score.weight` has 5 rows, one per label, but config.json defines 4 labels (2 by default); \
                    define one label per row in `id2label` and `label2id`";
    assert_eq!(problems(&folder("sequence").with_config(four)), [expected]);
    let none = folder("token").with_config(json!({"id2label": null, "label2id": null}));
    let found = problems(&none);
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(
        found[0]
            .starts_with("tensor `classifier.weight` has 7 rows, one per label, but config.json defines 2")
    );
    assert!(found[1].starts_with("tensor `classifier.bias` has 7 rows, one per label"));
    // A label count without label names, as old versions of transformers wrote it.
    let counted = json!({"id2label": null, "label2id": null, "num_labels": 7});
    let counted = folder("token").with_config(counted);
    assert!(problems(&counted).is_empty());
    assert_eq!(open(counted.path()).config().id2label[6], "LABEL_6");
    let contradiction = folder("sequence").with_config(json!({"num_labels": 3}));
    let message = Checkpoint::open(contradiction.path()).unwrap_err().to_string();
    assert!(message.contains("config.json: `num_labels` is 3, but its alias `id2label`"), "{message}");
    let question = folder("sequence").with_config(json!({"architectures": ["GPT2ForQuestionAnswering"]}));
    let message = Checkpoint::open(question.path()).unwrap_err().to_string();
    assert!(message.contains("GPT2ForQuestionAnswering") && message.contains("GPT2ForTokenClassification"));
}

/// A written head matches the original within the rounding of the dtype.
///
/// `scripts/checks/test_conversions.py` shows that transformers reads the files and computes the same logits.
#[cfg(not(target_os = "wasi"))]
#[test]
fn heads_survive_conversion() {
    let companions = load_tokenizer(fixture_path("tiny-checkpoint")).unwrap().into();
    for (name, _) in HEADS {
        let (target, original) = (temporary_folder(), open(&fixture_path("heads").join(name)));
        // Half precision rounds values below 4 to 11 or 8 significant bits. Values already in f16 stay exact.
        let f16 = if name == "pytorch-shards" { 0.0 } else { 4.0 / 2048.0 };
        for (dtype, largest) in
            [(WrittenDType::F32, 0.0), (WrittenDType::F16, f16), (WrittenDType::BF16, 4.0 / 256.0)]
        {
            let copy = target.path().join(dtype.name());
            write_hugging_face(&original, &companions, &copy, dtype, &|_| ()).unwrap();
            let copy = open(&copy);
            copy.check().unwrap();
            assert_eq!(copy.config(), original.config(), "{name}");
            let differing = differences(&original, &copy, &|_| ()).unwrap();
            let found = worst(differing.iter().map(|difference| match difference.kind {
                DifferenceKind::Values(largest) => largest,
                ref other => panic!("{name}: {}: {other:?}", difference.name),
            }));
            assert!(found <= largest, "{name} in {}: {found}", dtype.name());
            assert_eq!(
                copy.tensors().iter().filter(|tensor| !tensor.name.starts_with("transformer.")).count(),
                match name {
                    "token" | "double" => 2,
                    _ => 1,
                },
                "{name}"
            );
        }
        let gguf = target.path().join("model.gguf");
        let error = write_gguf(&original, &companions, &gguf, WrittenDType::F32, &|_| ()).unwrap_err();
        let class = original.config().head.class_name();
        let expected = format!("only the language-model head, but this is a {class}; write a folder");
        assert!(error.to_string().ends_with(&expected), "{error}");
        assert!(!gguf.exists());
    }
}

#[test]
fn models_do_not_load_as_another_kind() {
    let load = |name: &str| open(&fixture_path(name)).load(&LoadOptions::default(), &|_| ());
    for (name, expected) in [
        ("heads/sequence", "the model is a GPT2ForSequenceClassification, a classifier: it labels texts"),
        ("heads/token", "the model is a GPT2ForTokenClassification, a classifier: it labels tokens"),
    ] {
        let error = load(name).unwrap_err();
        assert!(matches!(error, WeightsError::UnsupportedHead { .. }));
        assert!(error.to_string().contains(expected), "{error}");
    }
    // A double-heads model contains a whole language model.
    assert_eq!(load("heads/double").unwrap().config().vocab_size, 300);
    let language_model = open(&fixture_path("tiny-checkpoint"));
    language_model.check_language_model().unwrap();
    let error = language_model.check_classifier().unwrap_err().to_string();
    assert!(
        error.contains("the model is a GPT2LMHeadModel, a language model: it generates and scores text"),
        "{error}"
    );
}
