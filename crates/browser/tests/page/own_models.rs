//! Models of one's own: read in every format, held in every precision, and refused in sentences that help.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use candle_gpt2::{Gpt2Config, Parameter, expected_parameters};
use candle_gpt2_engine::{ConvertOptions, ModelOptions, Silent};
use candle_gpt2_testing::{Browser, CheckpointFolder, fixture_path, pattern};
use candle_gpt2_weights::WrittenDType;
use serde_json::{Map, Value, json};

use crate::common::{
    BROWSERS, DTYPES, assert_quiet, choose, drawn, greedy, load, opened, opened_in, set_all, write,
    write_greedily, written,
};

const PROMPT: &str = "The dog";
/// Sizes of the checkpoint that is made here: matrices with a whole number of blocks of every precision, and one without.
const WIDTH: usize = 64;
const INNER: usize = 160;
const TOKENS: usize = 300;
const CONTEXT: usize = 96;

/// A checkpoint with weights from a pattern, and the tiny one's tokenizer.
fn checkpoint() -> CheckpointFolder {
    let sizes =
        json!({ "n_embd": WIDTH, "n_inner": INNER, "n_layer": 2, "n_positions": CONTEXT, "n_ctx": CONTEXT });
    CheckpointFolder::tiny().with_config(sizes).with_tensors(|tensors| {
        tensors.clear();
        let mut offset = 0;
        let mut add = |name: String, shape: &[usize], scale: f64, middle: f64| {
            offset += 100_003;
            let tensor = pattern(shape, scale, offset).affine(1.0, middle).unwrap();
            tensors.insert(format!("transformer.{name}"), tensor);
        };
        add("wte.weight".into(), &[TOKENS, WIDTH], 1.0, 0.0);
        add("wpe.weight".into(), &[CONTEXT, WIDTH], 0.5, 0.0);
        for layer in 0..2 {
            for (name, inputs, outputs) in [
                ("attn.c_attn", WIDTH, 3 * WIDTH),
                ("attn.c_proj", WIDTH, WIDTH),
                ("mlp.c_fc", WIDTH, INNER),
                ("mlp.c_proj", INNER, WIDTH),
            ] {
                add(format!("h.{layer}.{name}.weight"), &[inputs, outputs], 0.6, 0.0);
                add(format!("h.{layer}.{name}.bias"), &[outputs], 0.2, 0.0);
            }
        }
        for norm in ["h.0.ln_1", "h.0.ln_2", "h.1.ln_1", "h.1.ln_2", "ln_f"] {
            add(format!("{norm}.weight"), &[WIDTH], 0.2, 1.0);
            add(format!("{norm}.bias"), &[WIDTH], 0.2, 0.0);
        }
    })
}

/// Chooses files and waits until what is chosen has been told.
fn take(browser: &Browser, files: &[&Path]) {
    browser.script("document.querySelector('[data-testid=memory]').textContent = '';", json!([]));
    browser.choose_files("model-file", files);
    browser.wait_for("return document.querySelector('[data-testid=memory]').textContent !== '' || document.querySelector('[data-testid=status]').textContent.startsWith('error: ');");
}

/// Every text of a model on the page is the library's.
#[track_caller]
fn assert_texts(browser: &Browser, options: &ModelOptions, what: &str) {
    let model = load(options);
    assert_eq!(write_greedily(browser, PROMPT, 30), written(&model, PROMPT, greedy(30)), "{what}, greedy");
    choose(browser, "greedy", false);
    set_all(browser, &[("seed", "3"), ("temperature", "0.9"), ("top-k", "40")]);
    assert_eq!(write(browser), written(&model, PROMPT, drawn(30, 3, 0.9, 40, 1.0)), "{what}, drawn");
}

#[test]
fn a_checkpoint_writes_the_library_s_text_in_every_precision() {
    let folder = checkpoint();
    let files = ["model.safetensors", "config.json", "tokenizer.json"].map(|name| folder.file(name));
    let Some(browser) = opened() else { return };
    take(&browser, &files.each_ref().map(PathBuf::as_path));
    browser.wait_for_status("ready");
    let told = browser.text("memory");
    assert!(told.contains("model.safetensors") && told.contains(" kB"), "{told}");
    assert_texts(
        &browser,
        &ModelOptions { model: folder.path().into(), ..ModelOptions::default() },
        "as stored",
    );
    for (name, dtype) in DTYPES {
        choose(&browser, "dtype", name);
        browser.wait_for_status("ready");
        let options =
            ModelOptions { model: folder.path().into(), dtype: Some(dtype), ..ModelOptions::default() };
        assert_texts(&browser, &options, name);
    }
    browser.click("built-in");
    browser.wait_for_status("ready");
    assert!(browser.text("about").contains("Shakespeare"));
    assert_quiet(&browser);
}

#[test]
fn a_folder_is_taken_whole() {
    let folder = checkpoint();
    let Some(browser) = opened() else { return };
    browser.script("document.querySelector('[data-testid=memory]').textContent = '';", json!([]));
    browser.choose_files("model-folder", &[folder.path()]);
    browser.wait_for("return document.querySelector('[data-testid=memory]').textContent !== '';");
    browser.wait_for_status("ready");
    assert_texts(
        &browser,
        &ModelOptions { model: folder.path().into(), ..ModelOptions::default() },
        "a folder",
    );
    assert_quiet(&browser);
}

/// On a page that was opened from a file too.
#[test]
fn a_folder_can_be_dropped() {
    let folder = checkpoint();
    let Some(browser) = opened() else { return };
    for action in ["dragEnter", "dragOver", "drop"] {
        let data = json!({ "items": [], "files": [folder.path()], "dragOperationsMask": 1 });
        browser
            .devtools("Input.dispatchDragEvent", json!({ "type": action, "x": 50, "y": 50, "data": data }));
    }
    let name = folder.path().file_name().unwrap().to_str().unwrap();
    browser.wait_for(&format!(
        "return document.querySelector('[data-testid=about]').textContent.startsWith({});",
        json!(name)
    ));
    browser.wait_for_status("ready");
    assert_texts(
        &browser,
        &ModelOptions { model: folder.path().into(), ..ModelOptions::default() },
        "a folder that was dropped",
    );
    assert_quiet(&browser);
}

#[test]
fn gguf_and_pytorch_are_read_in_both_browsers() {
    let folder = checkpoint();
    let outputs = tempfile::tempdir().unwrap();
    let gguf = outputs.path().join("my own.gguf");
    let options = ModelOptions { model: folder.path().into(), ..ModelOptions::default() };
    let conversion = ConvertOptions { output: gguf.clone(), dtype: WrittenDType::Q8_0 };
    options.convert(&conversion, &Silent).unwrap();
    let pytorch = fixture_path("formats/pytorch-zip/pytorch_model.bin");
    let config = fixture_path("formats/pytorch-zip/config.json");
    let tokenizer = fixture_path("tiny-checkpoint/tokenizer.json");
    for kind in BROWSERS {
        let Some(browser) = opened_in(kind) else { continue };
        take(&browser, &[&gguf]);
        browser.wait_for_status("ready");
        assert_texts(&browser, &ModelOptions { model: gguf.clone(), ..ModelOptions::default() }, "GGUF");
        take(&browser, &[&pytorch, &config, &tokenizer]);
        browser.wait_for_status("ready");
        let options = ModelOptions {
            model: pytorch.parent().unwrap().into(),
            tokenizer: Some(tokenizer.clone()),
            ..ModelOptions::default()
        };
        let model = load(&options);
        let prompt = "a";
        assert_eq!(write_greedily(&browser, prompt, 12), written(&model, prompt, greedy(12)));
        assert_quiet(&browser);
    }
}

/// The page says this of the files, and writes as before.
#[track_caller]
fn assert_refused(browser: &Browser, files: &[&Path], words: &[&str]) {
    let before = write(browser);
    take(browser, files);
    let status = browser.wait_for_status("error: ");
    for word in words {
        assert!(status.contains(word), "{word:?} is not in {status:?}");
    }
    assert_eq!(write(browser), before, "after {status}");
}

#[test]
fn what_cannot_be_read_is_said_and_the_page_goes_on() {
    let folder = checkpoint();
    let Some(browser) = opened() else { return };
    let file = |name: &str| folder.file(name);
    let [weights, config, tokenizer] = ["model.safetensors", "config.json", "tokenizer.json"].map(file);

    // Damaged: the end is missing.
    let damaged = folder.file("damaged.safetensors");
    let bytes = std::fs::read(&weights).unwrap();
    std::fs::write(&damaged, &bytes[..bytes.len() / 2]).unwrap();
    assert_refused(&browser, &[&damaged, &config, &tokenizer], &["damaged.safetensors"]);

    // Foreign: no checkpoint, and one of another kind of model.
    let foreign = folder.file("photo.bin");
    std::fs::write(&foreign, b"\x89PNG\r\n\x1a\n and so on, for some bytes more").unwrap();
    assert_refused(&browser, &[&foreign], &["photo.bin"]);
    let bert = CheckpointFolder::tiny().with_tensors(|tensors| {
        tensors.clear();
        tensors.insert("bert.encoder.layer.0.attention.self.query.weight".into(), pattern(&[8, 8], 1.0, 0));
    });
    assert_refused(
        &browser,
        &[&bert.file("model.safetensors"), &bert.file("config.json"), &tokenizer],
        &["model.safetensors", "`wte.weight` is missing", " more"],
    );

    let all = browser.script("return document.querySelector('#status-lines').textContent;", json!([]));
    assert!(all.as_str().unwrap().contains("`bert.encoder.layer.0.attention.self.query.weight` is surplus"));

    // A tokenizer that is none, weights that are no numbers, a configuration of another model.
    let no_tokenizer = folder.file("no.tokenizer.json");
    std::fs::write(&no_tokenizer, r#"{"version": "1.0"}"#).unwrap();
    assert_refused(&browser, &[&weights, &config, &no_tokenizer], &["a vocabulary or another file"]);
    let other = CheckpointFolder::tiny().with_config(json!({ "n_embd": 24, "n_head": 3 }));
    assert_refused(
        &browser,
        &[&weights, &other.file("config.json"), &tokenizer],
        &["model.safetensors", "wte.weight", " more"],
    );
    let mut bytes = std::fs::read(&weights).unwrap();
    let end = bytes.len();
    bytes[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    let nan = folder.file("nan.safetensors");
    std::fs::write(&nan, bytes).unwrap();
    take(&browser, &[&nan, &config, &tokenizer]);
    let status = browser.wait_for_status("error: ");
    assert!(status.contains("not finite"), "{status}");
    browser.click("built-in");
    browser.wait_for_status("ready");

    // Files are missing, which are named; the one that comes later completes those that were chosen.
    assert_refused(&browser, &[&weights, &tokenizer], &["config.json"]);
    assert_refused(&browser, &[&weights, &config], &["tokenizer.json"]);
    take(&browser, &[&tokenizer]);
    browser.wait_for_status("ready");
    assert!(browser.text("about").starts_with("model.safetensors"), "{}", browser.text("about"));
}

/// A file of tensors in f32 of which nothing but the header stands on the disk.
fn only_header(path: &Path, parameters: &[Parameter]) {
    let (mut header, mut at) = (Map::new(), 0_u64);
    for Parameter { name, shape } in parameters {
        // Linear layers are the other way round in the file.
        let mut shape = shape.clone();
        if name.starts_with("h.") {
            shape.reverse();
        }
        let end = at + 4 * shape.iter().map(|size| *size as u64).product::<u64>();
        header.insert(name.clone(), json!({ "dtype": "F32", "shape": shape, "data_offsets": [at, end] }));
        at = end;
    }
    let header = Value::Object(header).to_string();
    let mut file = File::create(path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len(8 + header.len() as u64 + at).unwrap();
}

#[test]
fn what_the_memory_cannot_hold_is_refused_with_the_figure() {
    let sizes = json!({
        "n_embd": 1600, "n_layer": 48, "n_head": 25, "n_inner": null, "n_positions": 1024, "n_ctx": 1024, "vocab_size": 50257,
    });
    let folder = CheckpointFolder::tiny().with_config(sizes);
    let [config, tokenizer] = ["config.json", "tokenizer.json"].map(|name| folder.file(name));
    let all = expected_parameters(&Gpt2Config::preset("gpt2-xl").unwrap());
    // In one file, which has more bytes than WebAssembly can count.
    let one = folder.file("xl.safetensors");
    only_header(&one, &all);
    // In shards, which can be read, but not held as they are.
    let (first, second) = all.split_at(all.len() / 2);
    let names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    let mut shards = Map::new();
    for (name, parameters) in names.into_iter().zip([first, second]) {
        only_header(&folder.file(name), parameters);
        shards.extend(parameters.iter().map(|parameter| (parameter.name.clone(), name.into())));
    }
    let index = folder.file("model.safetensors.index.json");
    std::fs::write(&index, json!({ "weight_map": shards }).to_string()).unwrap();
    let [first, second] = names.map(|name| folder.file(name));
    for kind in BROWSERS {
        let Some(browser) = opened_in(kind) else { continue };
        assert_refused(&browser, &[&one, &config, &tokenizer], &["6230498835 bytes", "q8"]);
        // The figure, and what to do about it.
        assert_refused(&browser, &[&first, &second, &index, &config, &tokenizer], &["7.6 GB", "q8 ("]);
        let told = browser.text("memory");
        assert!(told.contains("1.56") && told.contains("q8"), "{told}");
    }
}
