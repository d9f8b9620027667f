//! What goes wrong: the worker breaks, files change under the page, the page is closed.

use std::path::Path;

use candle_gpt2_testing::{Browser, CheckpointFolder};
use serde_json::json;

use crate::common::{
    BROWSERS, address, assert_quiet, built_in, choose, greedy, opened, opened_in, set_all, write,
    write_greedily, written,
};

#[test]
fn a_worker_that_breaks_is_told_and_replaced() {
    let model = built_in(None);
    for kind in BROWSERS {
        let Some(browser) = opened_in(kind) else { continue };
        let text = write_greedily(&browser, "The quality", 10);
        break_worker(
            &browser,
            "engine.ask('tokenize', { prompt: 'a' }).then(() => document.body.dataset.isBack = true);",
        );
        let status = browser.wait_for_status("error: ");
        assert!(status.contains("unreachable"), "{status}");
        browser.wait_for("return document.body.dataset.isBack === 'true';");
        assert_eq!((browser.text("prompt"), browser.text("text")), ("The quality".to_owned(), text));
        assert_eq!(write_greedily(&browser, "The quality", 20), written(&model, "The quality", greedy(20)));
        // What is asked for before the model is back waits for it.
        set_all(&browser, &[("prompt", "O Romeo")]);
        break_worker(&browser, "document.getElementById('write').click();");
        browser.wait_for_status("ready");
        assert_eq!(browser.text("text"), written(&model, "O Romeo", greedy(20)));
        assert_quiet(&browser);
    }
}

/// Breaks the worker, as where WebAssembly traps outside of an answer, and does something in the same moment; from a script of the
/// page, for a driver's own sees less in Firefox.
fn break_worker(browser: &Browser, then: &str) {
    let script = "const script = document.createElement('script');
        script.textContent = `engine.worker.terminate();
            engine.worker.onerror(new ErrorEvent('error', { message: 'RuntimeError: unreachable' }));` + arguments[0];
        document.body.append(script);";
    browser.script(script, json!([then]));
}

/// The tokenizers library slices a token of one letter behind a prefix of four, and panics; in WebAssembly nothing catches that.
#[test]
fn a_panic_is_told_and_the_model_before_writes_on() {
    let model = built_in(None);
    let folder = CheckpointFolder::tiny();
    let bpe = json!({
        "type": "BPE", "continuing_subword_prefix": "####", "vocab": { "a": 0, "b": 1, "ab": 2 }, "merges": [["a", "b"]],
    });
    std::fs::write(folder.file("tokenizer.json"), json!({ "version": "1.0", "model": bpe }).to_string())
        .unwrap();
    let files = ["model.safetensors", "config.json", "tokenizer.json"].map(|name| folder.file(name));
    for kind in BROWSERS {
        let Some(browser) = opened_in(kind) else { continue };
        browser.choose_files("model-file", &files.each_ref().map(|file| -> &Path { file }));
        let status = browser.wait_for_status("error: ");
        assert!(status.contains("the engine stopped by a fault of its own: panicked at"), "{status}");
        assert_eq!(write_greedily(&browser, "O Romeo", 20), written(&model, "O Romeo", greedy(20)));
    }
}

#[test]
fn a_file_that_changes_under_the_page_is_told() {
    let folder = CheckpointFolder::tiny();
    let files = ["model.safetensors", "config.json", "tokenizer.json"].map(|name| folder.file(name));
    let Some(browser) = opened() else { return };
    let before = write_greedily(&browser, "O", 10);
    browser.choose_files("model-file", &files.each_ref().map(|file| -> &Path { file }));
    browser.wait_for("return document.querySelector('#about').textContent.startsWith('model.safetensors');");
    browser.wait_for_status("ready");
    std::fs::write(&files[0], b"something else").unwrap();
    // Another precision reads it again.
    choose(&browser, "dtype", "q8");
    let status = browser.wait_for_status("error: ");
    assert!(status.contains("model.safetensors"), "{status}");
    // The model before is still there.
    assert_ne!(write_greedily(&browser, "O", 10), before);
    assert_eq!(browser.text("status"), "ready");
}

#[test]
fn a_page_that_is_opened_again_goes_on_where_it_was() {
    let model = built_in(None);
    let Some(browser) = opened() else { return };
    set_all(
        &browser,
        &[
            ("prompt", "Fare thee well,\nmy"),
            ("seed", "31"),
            ("temperature", "1.1"),
            ("max-new-tokens", "17"),
        ],
    );
    let text = write(&browser);
    browser.wait_for("return location.hash.includes('seed=31') && location.hash.includes('Fare');");
    let link = browser.script("return location.href;", json!([]));
    // By its address, as from a bookmark; and without one, by what the browser kept.
    for url in [link.as_str().unwrap().to_owned(), address("").unwrap().trim_end_matches('#').to_owned()] {
        browser.go("about:blank");
        browser.go(&url);
        browser.wait_for_status("ready");
        assert_eq!(browser.text("prompt"), "Fare thee well,\nmy", "{url}");
        assert_eq!(browser.text("text"), text, "{url}");
        assert_eq!(browser.text("temperature"), "1.1");
    }
    // With the precision that it was held in.
    choose(&browser, "dtype", "q8");
    browser.wait_for_status("ready");
    browser.wait_for("return location.hash.includes('dtype=q8');");
    let link = browser.script("return location.href;", json!([]));
    browser.go("about:blank");
    browser.go(link.as_str().unwrap());
    browser.wait_for_status("ready");
    assert!(browser.text("about").contains(" q8 "), "{}", browser.text("about"));
    choose(&browser, "dtype", "");
    browser.wait_for_status("ready");
    browser.click("start-over");
    browser.wait_for_status("ready");
    assert_ne!(browser.text("prompt"), "Fare thee well,\nmy");
    // A model of one's own has to be chosen again, which is said, and the built-in one writes.
    browser.go("about:blank");
    browser.go(&address("prompt=Hark&model=mine.gguf&greedy=1&max-new-tokens=8").unwrap());
    browser.wait_for_status("ready");
    assert!(browser.text("memory").contains("mine.gguf"), "{}", browser.text("memory"));
    assert_eq!(browser.text("text"), written(&model, "Hark", greedy(8)));
    assert_quiet(&browser);
}

#[test]
fn two_texts_that_cross_do_not_mix() {
    let model = built_in(None);
    let Some(browser) = opened() else { return };
    set_all(&browser, &[("prompt", "I"), ("max-new-tokens", "30")]);
    choose(&browser, "greedy", true);
    // Write, and write again before the first text is done.
    let twice = "const find = name => document.querySelector(`[data-testid=${name}]`);
        find('write').click(); find('write').click();";
    browser.script(twice, json!([]));
    browser.wait_for_status("ready");
    assert_eq!(browser.text("text"), written(&model, "I", greedy(30)));
    assert_quiet(&browser);
}
