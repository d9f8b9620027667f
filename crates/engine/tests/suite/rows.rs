//! Bulk jobs with models.
//!
//! A row's result depends neither on the other rows nor on interruptions.

use std::fs;
use std::path::PathBuf;

use candle_gpt2_engine::{
    Classifier, EngineError, FailedRow, LoadedModel, ModelOptions, Question, Row, Rows, RowsJob, RowsOutput,
    ScoredText, Silent,
};
use candle_gpt2_generation::GenerationConfig;
use candle_gpt2_testing::{CheckpointFolder, fixture_path};
use serde::Serialize;
use serde_json::{Value, json};

const SETTINGS: &str = r#"{"seed":5}"#;

/// Runs a job over a `.jsonl` file with the destination `output`.
fn run<T: Serialize + Clone>(
    content: &str,
    output: RowsOutput<'_>,
    tokens: impl Fn(&Row) -> Result<T, EngineError>,
    work: impl FnOnce(&mut Rows<'_, T>) -> Result<(), EngineError>,
) -> Vec<FailedRow> {
    let job = RowsJob {
        input: "rows.jsonl".as_ref(),
        content: content.into(),
        output,
        settings: &serde_json::from_str(SETTINGS).unwrap(),
        what: "testing",
        format_error: &|error| error.to_string(),
        reporter: &Silent,
    };
    job.run(tokens, work).unwrap()
}

/// Returns the objects that `job` writes, after checking that resuming it writes the same ones.
///
/// The job is resumed after each possible number of lines.
fn objects(job: &dyn Fn(RowsOutput<'_>) -> Vec<FailedRow>) -> Vec<Value> {
    let mut lines = Vec::new();
    let failed = job(RowsOutput::Lines(Box::new(|line| {
        lines.push(line.to_owned());
        Ok(())
    })));
    let folder = tempfile::tempdir().unwrap();
    let [output, partial] = ["made", "made.partial"].map(|name| folder.path().join(name));
    for written in 0..=lines.len() {
        let kept: String = lines[..written].iter().map(|line| format!("{line}\n")).collect();
        fs::write(&partial, format!("{SETTINGS}\n{kept}")).unwrap();
        assert_eq!(job(RowsOutput::File { path: &output, resume: true }), failed);
        let text = fs::read_to_string(&output).unwrap();
        assert_eq!(text.lines().collect::<Vec<_>>(), lines, "{written} lines were present");
        fs::remove_file(&output).unwrap();
    }
    lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn load(folder: &CheckpointFolder) -> LoadedModel {
    let options = ModelOptions { model: folder.path().to_owned(), ..ModelOptions::default() };
    options.open(&Silent).unwrap().load(&Silent).unwrap()
}

fn classifier(name: &str) -> Classifier {
    let model: PathBuf = fixture_path("heads").join(name);
    let options = ModelOptions { model, ..ModelOptions::default() };
    options.open_classifier(&Silent).unwrap().load_classifier(&Silent).unwrap()
}

/// Generates completions for several rows; the third prompt cannot be continued.
#[test]
fn completions_do_not_depend_on_other_rows() {
    // Three tokens are allowed, each once, and the third prompt has used all of them.
    let suppressed: Vec<u32> = (0..300).filter(|id| ![5, 6, 7].contains(id)).collect();
    let config = json!({"suppress_tokens": suppressed, "no_repeat_ngram_size": 1, "eos_token_id": null});
    let model = load(&CheckpointFolder::tiny().with("generation_config.json", config.to_string()));
    let config = model.defaults().unwrap().config().clone();
    let config = GenerationConfig { max_new_tokens: 2, do_sample: true, seed: 5, ..config };
    let generate = |content: &str, batch_size: usize, config: &GenerationConfig| {
        objects(&|output| {
            let prompt = |row: &Row| row.prompt(model.vocabulary(), config);
            run(content, output, prompt, |rows| rows.generate(&model, batch_size, config, &[], &Silent))
        })
    };
    let rows = [
        r#"{"prompt": "The dog"}"#,
        r#"{"ids": [999]}"#,
        r#"{"ids": [5, 6, 7]}"#,
        r#"{"ids": []}"#,
        r#"{"ids": [2, 6], "more": 1}"#,
    ];
    let found = generate(&rows.join("\n"), 8, &config);
    assert!(found[1]["error"].as_str().unwrap().starts_with("token id 999"), "{}", found[1]);
    let no_token = "no token is left to choose from: each is excluded by `no_repeat_ngram_size` or `suppress_tokens`; relax one \
                    of them";
    assert_eq!(found[2], json!({"line": 3, "prompt_ids": [5, 6, 7], "error": no_token}));
    assert_eq!(found[3]["prompt_ids"], json!([0]), "an empty prompt starts from bos");
    for (index, row) in rows.iter().enumerate() {
        let mut alone = generate(row, 1, &config);
        alone[0]["line"] = json!(index + 1);
        assert_eq!(found[index], alone[0]);
    }
    for batch_size in [1, 2, 3] {
        assert_eq!(generate(&rows.join("\n"), batch_size, &config), found, "batches of {batch_size}");
    }
    let several = GenerationConfig { num_return_sequences: 2, ..config };
    let several = generate(rows[0], 8, &several);
    assert_eq!(several[0]["sequences"].as_array().unwrap().len(), 2);
}

#[test]
fn scores_do_not_depend_on_other_rows() {
    let model = load(&CheckpointFolder::tiny());
    let rows = "{\"prompt\": \"The dog\"}\n{\"ids\": [5, 6, 7]}\n{\"ids\": [5]}\n{\"ids\": [5, 999]}\n";
    let found = objects(&|output| {
        run(rows, output, |row| row.tokens(model.vocabulary()), |rows| rows.score(&model, None, 1))
    });
    for found in &found[..2] {
        let ids: Vec<u32> = serde_json::from_value(found["prompt_ids"].clone()).unwrap();
        let alone = serde_json::to_value(ScoredText::of(&model, &ids, None, 1, &|_| {}).unwrap()).unwrap();
        let fields = alone.as_object().unwrap().iter();
        assert_eq!(fields.filter(|(name, value)| found[name.as_str()] == **value).count(), 4);
    }
    assert!(found[2..].iter().all(|row| row["error"].is_string() && row["loss"].is_null()), "{found:?}");
}

#[test]
fn labels_equal_direct_classification_of_the_batch() {
    let model = classifier("sequence");
    let rows: String = (0..10).map(|number| format!("{{\"text\": \"citizen number {number}\"}}\n")).collect();
    let rows = format!("{rows}{{\"ids\": [999]}}\n{{\"ids\": [5, 6]}}\n");
    let found = objects(&|output| {
        let question = |row: &Row| row.question(model.vocabulary(), &[], None);
        run(&rows, output, question, |rows| rows.classify(&model, Some(4)))
    });
    assert!(found[10]["error"].is_string());
    let questions = (0..4).map(|number| format!("citizen number {number}"));
    let questions: Vec<_> =
        questions.map(|text| Question::of_text(model.vocabulary(), &text, None).unwrap()).collect();
    for (found, expected) in found.iter().zip(model.classify(&questions).unwrap()) {
        // Converted through text, because the job writes f32 values as text.
        let expected: Value = serde_json::from_str(&serde_json::to_string(&expected).unwrap()).unwrap();
        assert_eq!(found["labels"], expected["labels"]);
    }
}

#[test]
fn each_row_may_have_its_own_choices() {
    let model = classifier("double");
    let rows = "{\"prompt\": \"The sky is\", \"choices\": [\" blue\", \" green\"]}\n{\"ids\": [[5, 6], [7]]}\n\
                {\"prompt\": \"The\", \"choices\": 5}\n{\"prompt\": \"The sky is\"}\n";
    let classified = |choices: &[String]| {
        objects(&|output| {
            let question = |row: &Row| row.question(model.vocabulary(), choices, None);
            run(rows, output, question, |rows| rows.classify(&model, Some(2)))
        })
    };
    let found = classified(&[]);
    let texts = [" blue", " green"].map(String::from);
    let alone = Question::of_choices(model.vocabulary(), "The sky is", &texts, None).unwrap();
    assert_eq!(found[0]["prompt_ids"], json!(alone));
    assert_eq!(found[0]["choices"].as_array().unwrap().len(), 2);
    assert_eq!(found[1]["prompt_ids"], json!([[5, 6], [7]]));
    assert!(found[2]["error"].as_str().unwrap().starts_with("`choices`: expected a list of strings"));
    assert!(found[3]["error"].as_str().unwrap().starts_with("expected at least one choice"));
    assert_eq!(classified(&texts)[3]["prompt_ids"], found[0]["prompt_ids"]);
}
