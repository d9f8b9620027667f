//! Writing: when the page opens, greedily, with a seed, in every precision, after another choice of a token.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;

use candle_gpt2::{LogitsFor, Pass};
use candle_gpt2_engine::LoadedModel;
use candle_gpt2_interpret::Run;
use candle_gpt2_testing::{Browser, BrowserKind, keys, skipped};
use serde_json::{Value, json};

use crate::common::{
    BROWSERS, DTYPES, PROGRAM_VARIABLE, assert_quiet, built_in, choose, continued, drawn, greedy, opened,
    opened_in, set_all, write, write_greedily, written,
};

/// Characters of one to four bytes, and one of two.
const PROMPT: &str = "ROMEO: \u{65e5}\u{672c}\u{8a9e} \u{1f600} e\u{301}\nShall I";

/// The number that a setting has.
fn number<T: FromStr<Err: std::fmt::Debug>>(browser: &Browser, name: &str) -> T {
    browser.text(name).parse().unwrap()
}

#[test]
fn it_has_written_when_it_is_open_and_asked_for_nothing() {
    let model = built_in(None);
    for kind in BROWSERS {
        let Some(browser) = opened_in(kind) else { continue };
        let settings = drawn(
            number(&browser, "max-new-tokens"),
            number(&browser, "seed"),
            number(&browser, "temperature"),
            number(&browser, "top-k"),
            number(&browser, "top-p"),
        );
        let expected = written(&model, &browser.text("prompt"), settings);
        assert!(expected.len() > 20);
        assert_eq!(browser.text("text"), expected);
        assert_eq!(browser.script("return location.protocol;", json!([])), "file:");
        assert_quiet(&browser);
    }
}

#[test]
fn its_policy_lets_nothing_out() {
    let Some(browser) = opened() else { return };
    let attempts = "window.refused = [];
        addEventListener('securitypolicyviolation', event => window.refused.push(event.effectiveDirective));
        fetch('https://example.org/').catch(() => {});
        new Image().src = 'https://example.org/a.png';
        navigator.sendBeacon('https://example.org/');
        try { new WebSocket('wss://example.org/'); } catch {}";
    browser.script(attempts, json!([]));
    browser.wait_for("return window.refused.length === 4;");
    let mut refused: Vec<Value> =
        browser.script("return window.refused;", json!([])).as_array().unwrap().clone();
    refused.sort_by_key(Value::to_string);
    assert_eq!(refused, ["connect-src", "connect-src", "connect-src", "img-src"]);
}

#[test]
fn greedy_and_drawn_texts_are_the_library_s() {
    let model = built_in(None);
    for kind in BROWSERS {
        let Some(browser) = opened_in(kind) else { continue };
        assert_eq!(write_greedily(&browser, PROMPT, 40), written(&model, PROMPT, greedy(40)));
        choose(&browser, "greedy", false);
        for (seed, temperature, top_k, top_p) in [(12_345, 1.3, 0, 0.9), (0, 0.5, 3, 1.0)] {
            let numbers = [temperature.to_string(), top_k.to_string(), top_p.to_string()];
            let names = ["temperature", "top-k", "top-p"];
            let values: Vec<(&str, &str)> =
                names.into_iter().zip(numbers.iter().map(String::as_str)).collect();
            set_all(&browser, &values);
            set_all(
                &browser,
                &[("seed", &seed.to_string()), ("max-new-tokens", "60"), ("prompt", "JULIET:")],
            );
            let expected = written(&model, "JULIET:", drawn(60, seed, temperature, top_k, top_p));
            assert_eq!(write(&browser), expected, "{kind:?}, seed {seed}");
        }
        assert_quiet(&browser);
    }
}

#[test]
fn every_precision_writes_the_library_s_text() {
    let Some(browser) = opened() else { return };
    set_all(&browser, &[("prompt", "What say you,"), ("max-new-tokens", "50"), ("seed", "9")]);
    for (name, dtype) in DTYPES {
        let model = built_in(Some(dtype));
        choose(&browser, "dtype", name);
        // It writes by itself once the model is there.
        browser.wait_for_status("ready");
        let expected = written(&model, "What say you,", drawn(50, 9, 0.8, 50, 1.0));
        assert_eq!(browser.text("text"), expected, "{name}");
        let expected = written(&model, "My lord", greedy(50));
        assert_eq!(write_greedily(&browser, "My lord", 50), expected, "{name}");
        choose(&browser, "greedy", false);
        browser.set("prompt", "What say you,");
    }
    assert_quiet(&browser);
}

/// The program, where the variable names it or it was built beside this test.
fn program() -> Option<PathBuf> {
    let beside = || Some(std::env::current_exe().ok()?.parent()?.parent()?.join("gpt2"));
    let program = std::env::var_os(PROGRAM_VARIABLE).map(PathBuf::from).or_else(beside);
    let program = program.filter(|program| program.is_file());
    if program.is_none() {
        skipped(&format!("the command of the page, because {PROGRAM_VARIABLE} does not name the program"));
    }
    program
}

/// What a command of the page prints.
pub(crate) fn printed_by(program: &Path, command: &str, folder: &Path) -> String {
    let path = format!("{}:{}", program.parent().unwrap().display(), std::env::var("PATH").unwrap());
    let output =
        Command::new("sh").args(["-c", command]).env("PATH", path).current_dir(folder).output().unwrap();
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_command_that_is_shown_writes_the_same_bytes() {
    let Some(program) = program() else { return };
    let Some(browser) = opened() else { return };
    let folder = std::env::temp_dir();
    let is_same = || {
        let text = browser.text("text");
        assert!(text.len() > 20);
        let command = browser.text("command");
        assert_eq!(printed_by(&program, &command, &folder), format!("{text}\n"), "{command}");
    };
    is_same();
    for prompt in ["-- it's \"so\"\n$HOME `x` \\ \u{1f600}", "--greedy"] {
        set_all(
            &browser,
            &[("prompt", prompt), ("seed", "77"), ("temperature", "1.15"), ("top-k", "0"), ("top-p", "0.85")],
        );
        write(&browser);
        is_same();
    }
    choose(&browser, "dtype", "q4");
    browser.wait_for_status("ready");
    write_greedily(&browser, "The king", 30);
    is_same();
    assert_quiet(&browser);
}

/// The tokens of the open box: what stands there, and the numbers beside it.
const CHOICES: &str = "return [...document.querySelectorAll('[data-testid=alternatives] [role=option]')]
    .map(one => [one.firstChild.textContent.replaceAll('·', ' ').replaceAll('↵', '\\n'), one.textContent]);";

/// The probability that a line of the box shows.
fn share(line: &Value) -> f64 {
    let numbers = line[1].as_str().unwrap().split(|c: char| !c.is_ascii_digit() && c != '.');
    let is_share = |number: &&str| number.split_once('.').is_some_and(|(_, decimals)| decimals.len() == 4);
    numbers.filter(|number| !number.is_empty()).find(is_share).unwrap().parse().unwrap()
}

#[test]
fn alternatives_are_the_model_s_move_with_the_settings_and_can_be_chosen() {
    let model = built_in(None);
    let Some(browser) = opened() else { return };
    let text = write_greedily(&browser, "The quality of", 12);
    choose(&browser, "greedy", false);
    set_all(&browser, &[("temperature", "1"), ("top-k", "0"), ("top-p", "1")]);
    browser.point("return document.querySelectorAll('[data-testid=text] span')[2];", true);
    browser.wait_for(
        "return document.querySelectorAll('[data-testid=alternatives] [role=option]').length === 20;",
    );

    // What the library says of that place.
    let prompt = model.vocabulary().encode("The quality of").unwrap();
    let mut ids = prompt.clone();
    ids.extend(model.vocabulary().encode(&text).unwrap().into_iter().take(2));
    let logits = logits(&model, &ids);
    let mut order: Vec<(u32, f64)> = (0..).zip(logits).collect();
    order.sort_by(|a, b| b.1.total_cmp(&a.1));
    let shares = |temperature: f64, kept: usize| -> Vec<f64> {
        let powers: Vec<f64> =
            order[..kept].iter().map(|(_, logit)| ((logit - order[0].1) / temperature).exp()).collect();
        let sum: f64 = powers.iter().sum();
        powers.into_iter().map(|power| power / sum).chain(std::iter::repeat(0.0)).take(20).collect()
    };
    let check = |temperature: f64, kept: usize| {
        let shown = browser.script(CHOICES, json!([]));
        let expected = shares(temperature, kept);
        for (n, line) in shown.as_array().unwrap().iter().enumerate() {
            let token = decoded(&model, &[order[n].0]);
            assert_eq!(line[0], token, "{n}");
            assert!((share(line) - expected[n]).abs() < 1e-4, "{n}: {line}, expected {}", expected[n]);
        }
    };
    check(1.0, order.len());
    let first = browser.script(CHOICES, json!([]));
    let has_moved =
        format!("return JSON.stringify((() => {{ {CHOICES} }})()) !== {};", json!(first.to_string()));
    browser.set("temperature", "0.25");
    browser.wait_for(&has_moved);
    wait_until_still(&browser);
    check(0.25, order.len());
    browser.set("top-k", "3");
    wait_until_still(&browser);
    check(0.25, 3);

    // A token with a space in front, in place of the one that stands there.
    choose(&browser, "greedy", true);
    browser.press(&[keys::ESCAPE]);
    let mut ids = prompt.clone();
    ids.extend(model.vocabulary().encode(&text).unwrap().into_iter().take(5));
    let mut order: Vec<(u32, f64)> = (0..).zip(self::logits(&model, &ids)).collect();
    order.sort_by(|a, b| b.1.total_cmp(&a.1));
    let place = (1..20).find(|n| decoded(&model, &[order[*n].0]).starts_with(' ')).unwrap();
    browser.script("document.querySelectorAll('[data-testid=text] span')[5].focus();", json!([]));
    browser.press(&[keys::ENTER]);
    browser.wait_for("return document.activeElement.role === 'option' && document.activeElement.closest('[data-testid=alternatives]') !== null;");
    browser.press(&[keys::HOME]);
    (0..place).for_each(|_| browser.press(&[keys::DOWN]));
    browser.press(&[keys::ENTER]);
    // The token that was chosen has the focus at once, and nothing takes it away later.
    browser.wait_for(
        "return document.activeElement === document.querySelectorAll('[data-testid=text] span')[5];",
    );
    browser.wait_for_status("ready");
    ids.push(order[place].0);
    let before = decoded(&model, &ids[prompt.len()..]);
    assert_eq!(browser.text("text"), format!("{before}{}", continued(&model, &ids, greedy(12))));
    assert_quiet(&browser);
}

#[test]
fn a_text_ends_where_the_context_does() {
    let model = built_in(None);
    let Some(browser) = opened() else { return };
    let text = write_greedily(&browser, "To be", 300);
    assert_eq!(text, written(&model, "To be", greedy(300)));
    assert!(browser.text("command").contains("--max-new-tokens 300"));
    let is_disabled = "return document.querySelector('[data-testid=go-on]').disabled;";
    assert_eq!(browser.script(is_disabled, json!([])), true);
    // A look takes as many of its tokens as it can.
    browser.click("lens");
    browser.wait_for("return document.querySelector('#looked-at').textContent.includes('the first 128');");
    browser.wait_for("return document.querySelector('[data-testid=inside-error]').textContent === '' && !document.querySelector('#report').hidden;");
    assert_quiet(&browser);
}

/// Waits until the box has not changed for some frames: a look that the last setting asked for has come.
fn wait_until_still(browser: &Browser) {
    let script = "const now = document.querySelector('[data-testid=alternatives]').textContent;
        window.still = window.last === now ? (window.still ?? 0) + 1 : 0;
        window.last = now;
        return window.still > 30;";
    browser.script("window.still = 0; window.last = null;", json!([]));
    browser.wait_for(script);
}

/// The text of ids.
fn decoded(model: &LoadedModel, ids: &[u32]) -> String {
    String::from_utf8(ids.iter().flat_map(|id| model.vocabulary().token_bytes(*id)).collect()).unwrap()
}

/// The logits of what follows these ids.
fn logits(model: &LoadedModel, ids: &[u32]) -> Vec<f64> {
    let input = Run::new(model.model(), ids).unwrap().input().unwrap();
    let logits =
        model.model().forward_with(&input, LogitsFor::LastToken, None, &mut Pass::inference()).unwrap(); // (1, 1, V)
    candle_gpt2_testing::values(&logits)
}

#[test]
fn a_stop_leaves_what_was_written() {
    let model = built_in(None);
    for kind in BROWSERS {
        let Some(browser) = opened_in(kind) else { continue };
        set_all(&browser, &[("prompt", "O"), ("max-new-tokens", "240")]);
        choose(&browser, "greedy", true);
        let stop_soon = "const find = name => document.querySelector(`[data-testid=${name}]`);
            const wait = () => { if (find('text').textContent.length > 8) find('stop').click(); else setTimeout(wait); };
            find('write').click(); window.begun = find('status').textContent; wait();";
        browser.script(stop_soon, json!([]));
        assert_eq!(browser.script("return window.begun;", json!([])), "writing");
        browser.wait_for_status("ready");
        let whole = written(&model, "O", greedy(240));
        let text = browser.text("text");
        assert!(text.len() > 8 && text.len() < whole.len() && whole.starts_with(&text), "{text}");
        // And the rest of it.
        if kind == BrowserKind::Chromium {
            browser.set("max-new-tokens", "20");
            browser.click("go-on");
            browser.wait_for_status("ready");
            let longer = browser.text("text");
            assert!(longer.len() > text.len() && whole.starts_with(&longer), "{longer}");
        }
        assert_quiet(&browser);
    }
}

#[test]
fn settings_that_cannot_be_are_named() {
    let Some(browser) = opened() else { return };
    for (name, value, beginning) in [
        ("temperature", "3", "error: temperature: "),
        ("top-p", "1.5", "error: top-p: "),
        ("seed", "many", "error: seed: "),
    ] {
        let before = browser.text(name);
        browser.set(name, value);
        browser.click("write");
        browser.wait_for_status(beginning);
        browser.set(name, &before);
    }
    let text = write(&browser);
    assert!(text.len() > 20);
    assert_quiet(&browser);
}
