//! What the page shows of the model's inside: the numbers are the library's.

use candle_gpt2_engine::LoadedModel;
use candle_gpt2_interpret::{Head, LensOptions, Patterns, Run, logit_lens};
use candle_gpt2_look::{HeadSteps, OneHead, Reader, Subject, Text};
use candle_gpt2_testing::Browser;
use serde_json::{Value, json};

use crate::common::{assert_quiet, built_in, choose, opened, write_greedily};

const PROMPT: &str = "The quality of mercy is not strained,";

/// The page after a text of a few tokens, and the ids that stand there.
fn opened_with_text(model: &LoadedModel) -> Option<(Browser, Vec<u32>)> {
    let browser = opened()?;
    let text = write_greedily(&browser, PROMPT, 4);
    let ids = model.vocabulary().encode(&format!("{PROMPT}{text}")).unwrap();
    Some((browser, ids))
}

/// The rows of a table, without the labels.
fn cells(browser: &Browser, table: &str) -> Vec<Vec<String>> {
    let script = format!(
        "return [...document.querySelectorAll('{table} tr')].filter(row => row.querySelector('td')).map(row => [...row.querySelectorAll('td')].map(cell => cell.textContent));"
    );
    serde_json::from_value(browser.script(&script, json!([]))).unwrap()
}

fn number(text: &str) -> f64 {
    text.trim().replace('\u{2212}', "-").parse().unwrap_or_else(|_| panic!("{text:?} is no number"))
}

#[test]
fn attention_is_the_model_s() {
    let model = built_in(None);
    let Some((browser, ids)) = opened_with_text(&model) else { return };
    browser.click("attention");
    let name = "return document.querySelector('#report-name').textContent;";
    let (layers, heads) = (model.config().n_layer, model.config().n_head);
    browser.wait_for(&format!(
        "return document.querySelectorAll('[data-testid=report] .heads button').length === {};",
        layers * heads
    ));
    let press =
        "[...document.querySelectorAll('.heads button')].find(one => one.title === arguments[0]).click();";
    for head in [Head { layer: 0, head: 0 }, Head { layer: 3, head: 5 }] {
        let title = format!("layer {}, head {}", head.layer, head.head);
        browser.script(press, json!([title]));
        assert_eq!(browser.script(name, json!([])), title);
        browser.wait_for(&format!(
            "return document.querySelectorAll('#report-values td').length === {};",
            ids.len() * ids.len()
        ));
        let run = Run::new(model.model(), &ids).unwrap();
        let patterns = Patterns::of(run.record(Patterns::sites(&[head])).unwrap(), &[head]).unwrap();
        let shown = cells(&browser, "#report-values");
        for (query, row) in shown.iter().enumerate() {
            assert_eq!(row.len(), ids.len());
            for (key, cell) in row.iter().enumerate().take(query + 1) {
                let at = head_start(&patterns, head, ids.len()) + query * ids.len() + key;
                let expected = f64::from(patterns.values[at].unwrap());
                assert!(
                    (number(cell) - expected).abs() < 2e-5,
                    "{title}, {query}, {key}: {cell}, expected {expected}"
                );
            }
        }
    }
    assert_quiet(&browser);
}

/// Where a head's values begin.
fn head_start(patterns: &Patterns, head: Head, len: usize) -> usize {
    let row = patterns.layers.iter().position(|layer| *layer == head.layer).unwrap();
    let column = patterns.heads.iter().position(|one| *one == head.head).unwrap();
    (row * patterns.heads.len() + column) * len * len
}

#[test]
fn the_lens_is_the_model_s() {
    let model = built_in(None);
    let Some((browser, ids)) = opened_with_text(&model) else { return };
    browser.click("lens");
    let run = Run::new(model.model(), &ids).unwrap();
    let layers = logit_lens(&run, &LensOptions { top: 1, watch: Vec::new() }, &|_, x| Ok(x)).unwrap();
    browser.wait_for(&format!(
        "return document.querySelectorAll('#report-values td').length === {};",
        layers.len() * ids.len()
    ));
    let shown = cells(&browser, "#report-values");
    assert_eq!(shown.len(), layers.len());
    // The first layer is at the bottom.
    for (row, layer) in shown.iter().rev().zip(&layers) {
        for (cell, expected) in row.iter().zip(&layer.cells) {
            let expected = f64::from(expected.top[0].1).exp();
            let shown = number(cell.split_whitespace().next().unwrap());
            assert!((shown - expected).abs() < 1e-3, "{cell}, expected {expected}");
        }
    }
    assert_quiet(&browser);
}

/// The steps of one head by the library.
fn steps(model: &LoadedModel, ids: &[u32], head: Head, query: i64, key: i64) -> HeadSteps {
    let reader = Reader::without_bos(model.vocabulary());
    let subject = Subject::new(model, "model".into(), &reader);
    let look = OneHead { text: Text::Ids(ids.to_vec()), head, query, key };
    look.check(&reader).unwrap().look(&subject).unwrap()
}

#[test]
fn a_head_step_by_step_is_the_model_s() {
    let model = built_in(None);
    let Some((browser, ids)) = opened_with_text(&model) else { return };
    browser.click("head");
    browser.wait_for("return document.querySelectorAll('[data-testid=steps] > li').length === 6;");
    for (name, value) in [("head-layer", "2"), ("head-head", "3"), ("head-query", "6"), ("head-key", "4")] {
        choose(&browser, name, value);
    }
    let expected = steps(&model, &ids[..7], Head { layer: 2, head: 3 }, 6, 4);
    browser.wait_for("return ['query', 'key', 'layer', 'head'].map(name => document.querySelector(`#head-${name}`).value).join() === '6,4,2,3' && document.querySelector('#head-title').textContent.includes('in head 3 of layer 2: ');");
    let vectors = "return [...document.querySelectorAll('[data-testid=steps] .vector')].map(one => [...one.querySelectorAll('li')].map(cell => Number(cell.title.split(': ')[1])));";
    let shown: Vec<Vec<f64>> = serde_json::from_value(browser.script(vectors, json!([]))).unwrap();
    let weighted: Vec<f32> = expected.v.iter().map(|value| value * expected.weights[4]).collect();
    let all = [&expected.q, &expected.k, &expected.products, &expected.v, &weighted, &expected.context];
    assert_eq!(shown.len(), all.len());
    for (n, (shown, expected)) in shown.iter().zip(all).enumerate() {
        assert_eq!(shown.len(), expected.len());
        for (shown, expected) in shown.iter().zip(expected) {
            assert!((shown - f64::from(*expected)).abs() < 1e-4, "vector {n}: {shown}, expected {expected}");
        }
    }
    let formulas =
        "return [...document.querySelectorAll('[data-testid=steps] .formula')].map(one => one.textContent);";
    let formulas: Vec<String> = serde_json::from_value(browser.script(formulas, json!([]))).unwrap();
    for (formula, expected) in formulas.iter().zip([expected.score, expected.scaled]) {
        let shown = number(formula.split_whitespace().last().unwrap());
        assert!((shown - f64::from(expected)).abs() < 1e-3, "{formula}, expected {expected}");
    }
    // The weights as a table: scores, and what softmax makes of them.
    let rows = cells(&browser, "[data-testid=steps] li:nth-of-type(5) table");
    for (n, (score, weight)) in expected.scores.iter().zip(&expected.weights).enumerate() {
        assert!((number(&rows[n][0]) - f64::from(*score)).abs() < 1e-4, "{n}: {rows:?}");
        assert!((number(&rows[n][3]) - f64::from(*weight)).abs() < 1e-4, "{n}: {rows:?}");
    }
    assert_quiet(&browser);
}

/// The numbers that the articles print for their example: the second word looks at the six.
#[test]
fn the_articles_example_has_their_numbers() {
    let Some(browser) = opened() else { return };
    browser.click("head");
    browser.wait_for("return document.querySelectorAll('[data-testid=steps] > li').length === 6;");
    choose(&browser, "head-example", true);
    browser.wait_for("return document.querySelector('#head-title').textContent.includes('six words');");
    let shown = browser.text("steps");
    // w22 = 1.8524, the weights 0.1500, 0.2264, 0.2199, 0.1311, 0.0906, 0.1820, the context vector 0.3061, 0.8210.
    for number in ["1.8524", "0.1500", "0.2264", "0.2199", "0.1311", "0.0906", "0.1820", "0.3061", "0.8210"] {
        assert!(shown.contains(number), "{number} in {shown}");
    }
    assert_quiet(&browser);
}

#[test]
fn the_bars_of_what_comes_next_move_with_the_settings() {
    let Some(browser) = opened() else { return };
    let model = built_in(None);
    let text = write_greedily(&browser, PROMPT, 4);
    choose(&browser, "greedy", false);
    let bars = "return [...document.querySelectorAll('[data-testid=next] [role=option]')].map(one => one.textContent);";
    browser.wait_for("return document.querySelectorAll('[data-testid=next] [role=option]').length === 10;");
    browser.set("temperature", "2");
    browser.wait_for("return document.querySelector('#next-about').textContent.endsWith('These settings leave 50 tokens to draw from.');");
    let flat = browser.script(bars, json!([]));
    browser.set("top-k", "1");
    browser.wait_for("return document.querySelector('#next-about').textContent.endsWith('These settings leave one token.');");
    let sharp = browser.script(bars, json!([]));
    assert_ne!(flat, sharp);
    assert!(
        sharp[0].as_str().unwrap().contains("1.0000") && sharp[1].as_str().unwrap().contains("0.0000"),
        "{sharp}"
    );
    // The first is the token that greedy writing takes.
    let next = crate::common::written(&model, &format!("{PROMPT}{text}"), crate::common::greedy(1));
    let first = browser.script(
        "return document.querySelector('[data-testid=next] [role=option]').firstChild.textContent.replaceAll('·', ' ').replaceAll('↵', '\\n');",
        json!([]),
    );
    assert_eq!(first, Value::String(next));
    assert_quiet(&browser);
}
