//! The page, opened; models of the library beside it.

use std::path::PathBuf;

use candle_gpt2_engine::{LoadedModel, ModelOptions, Silent};
use candle_gpt2_generation::GenerationConfig;
use candle_gpt2_testing::{Browser, BrowserKind, skipped};
use candle_gpt2_weights::WeightDType;
use serde_json::{Value, json};

/// Names the folder with the built page.
pub(crate) const WEB_VARIABLE: &str = "GPT2_WEB";
/// Names the program.
pub(crate) const PROGRAM_VARIABLE: &str = "GPT2_PROGRAM";

/// Both browsers.
pub(crate) const BROWSERS: [BrowserKind; 2] = [BrowserKind::Chromium, BrowserKind::Firefox];

/// How the precisions are called on the page.
pub(crate) const DTYPES: [(&str, WeightDType); 4] =
    [("f32", WeightDType::F32), ("f16", WeightDType::F16), ("q8", WeightDType::Q8), ("q4", WeightDType::Q4)];

/// The folder with the built page; without one it is said that the test is skipped.
///
/// # Panics
/// When the variable names no such folder: a run that asks for these tests must not skip them.
pub(crate) fn web() -> Option<PathBuf> {
    let Some(folder) = std::env::var_os(WEB_VARIABLE) else {
        skipped(&format!("{WEB_VARIABLE} does not name a folder with the built page"));
        return None;
    };
    // Tests run in the folder of their crate.
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..").join(folder);
    assert!(folder.join("gpt2.html").is_file(), "{} has no gpt2.html", folder.display());
    Some(folder.canonicalize().unwrap())
}

/// The address of the page in one file.
pub(crate) fn address(fragment: &str) -> Option<String> {
    Some(format!("file://{}#{fragment}", web()?.join("gpt2.html").display()))
}

/// The page in one file, after it has written its first text.
pub(crate) fn opened_in(kind: BrowserKind) -> Option<Browser> {
    let browser = Browser::open_in(kind, &address("")?, 1200)?;
    browser.wait_for_status("ready");
    Some(browser)
}

/// The same in Chromium.
pub(crate) fn opened() -> Option<Browser> {
    opened_in(BrowserKind::Chromium)
}

/// The model inside the page, by the library.
pub(crate) fn built_in(dtype: Option<WeightDType>) -> LoadedModel {
    load(&ModelOptions { dtype, ..ModelOptions::default() })
}

/// A model by the library.
pub(crate) fn load(options: &ModelOptions) -> LoadedModel {
    options.open(&Silent).unwrap().load(&Silent).unwrap()
}

/// What a model writes after some tokens.
pub(crate) fn continued(
    model: &LoadedModel,
    prompt: &[u32],
    change: impl FnOnce(&mut GenerationConfig),
) -> String {
    let defaults = model.defaults().unwrap();
    let mut config = defaults.config().clone();
    change(&mut config);
    let config = defaults.complete(config).unwrap();
    model.text_generator(prompt, &config).unwrap().map(Result::unwrap).collect()
}

/// What a model writes after a prompt.
pub(crate) fn written(
    model: &LoadedModel,
    prompt: &str,
    change: impl FnOnce(&mut GenerationConfig),
) -> String {
    continued(model, &model.vocabulary().encode(prompt).unwrap(), change)
}

/// Settings that always take the most probable token.
pub(crate) fn greedy(tokens: usize) -> impl Fn(&mut GenerationConfig) {
    move |config| {
        config.max_new_tokens = tokens;
        config.do_sample = false;
    }
}

/// Settings that draw.
pub(crate) fn drawn(
    tokens: usize,
    seed: u64,
    temperature: f64,
    top_k: usize,
    top_p: f64,
) -> impl Fn(&mut GenerationConfig) {
    move |config| {
        config.max_new_tokens = tokens;
        config.do_sample = true;
        (config.seed, config.temperature, config.top_k, config.top_p) = (seed, temperature, top_k, top_p);
    }
}

/// Puts a choice in a list, or a check in a box, as a user's own change.
pub(crate) fn choose(browser: &Browser, name: &str, value: impl Into<Value>) {
    let script = "const part = document.querySelector(`[data-testid=${arguments[0]}]`);
        part[part.type === 'checkbox' ? 'checked' : 'value'] = arguments[1];
        part.dispatchEvent(new Event('change', { bubbles: true }));";
    browser.script(script, json!([name, value.into()]));
}

/// Puts a number where another stands; the settings hear of it.
pub(crate) fn set_all(browser: &Browser, values: &[(&str, &str)]) {
    for (name, value) in values {
        browser.set(name, value);
    }
}

/// Presses Write, and gives the text.
pub(crate) fn write(browser: &Browser) -> String {
    browser.click("write");
    browser.wait_for_status("ready");
    browser.text("text")
}

/// Writes so many tokens after a prompt, always the most probable one.
pub(crate) fn write_greedily(browser: &Browser, prompt: &str, tokens: usize) -> String {
    set_all(browser, &[("prompt", prompt), ("max-new-tokens", &tokens.to_string())]);
    choose(browser, "greedy", true);
    write(browser)
}

/// Nothing was complained of, and nothing was asked for.
#[track_caller]
pub(crate) fn assert_quiet(browser: &Browser) {
    assert_eq!(browser.complaints(), Vec::<String>::new());
}
