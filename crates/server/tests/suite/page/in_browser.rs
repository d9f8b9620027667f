//! What the page does in a browser.
//!
//! Needs Chromium and chromedriver; where there are none, each test says what was skipped.

use serde_json::{Value, json};

use crate::common::{Running, built_in, json_request, start_model};
use candle_gpt2_testing::{Browser, keys};

/// The server of the built-in model, and the page in a browser, ready.
fn opened(change: impl FnOnce(&mut candle_gpt2_server::ServerOptions)) -> Option<(Running, Browser)> {
    let server = start_model(built_in(), "shakespeare", change);
    let browser = Browser::open(&server.url(), 1200)?;
    browser.wait_for_status("ready");
    Some((server, browser))
}

fn opened_as_it_is() -> Option<(Running, Browser)> {
    opened(|_| ())
}

/// Writes so many tokens after a prompt, greedily.
fn write(browser: &Browser, prompt: &str, tokens: usize) {
    browser.set("max-new-tokens", &tokens.to_string());
    browser.set("temperature", "0");
    browser.type_into("prompt", prompt);
    browser.click("write");
    browser.wait_for_status("ready");
}

/// The text that the server writes there, greedily.
fn greedy(server: &Running, prompt: &str, tokens: usize) -> String {
    let body = json!({ "prompt": prompt, "max_tokens": tokens, "temperature": 0 });
    server.post("/v1/completions", &body).json()["choices"][0]["text"].as_str().unwrap().to_owned()
}

/// The piece of text whose colour was drawn as the n-th.
fn coloured(n: usize) -> String {
    format!(
        "return [...document.querySelectorAll('#colours span')].filter(one => one.style.background)[{n}];"
    )
}

#[test]
fn what_is_written_is_what_the_server_writes() {
    let Some((server, browser)) = opened_as_it_is() else { return };
    let prompt = "ROMEO: \u{65e5}\u{672c}\u{8a9e} \u{1f600} e\u{301}\nShall I";
    write(&browser, prompt, 40);
    let expected = greedy(&server, prompt, 40);
    assert_eq!(browser.text("prompt"), format!("{prompt}{expected}"));
    assert_eq!(browser.text("text"), expected);
    assert!(
        browser.text("numbers").starts_with("40 tokens · the first after "),
        "{}",
        browser.text("numbers")
    );
    // The coloured pieces are the text that was written, and lie under it.
    let drawn = "return [...document.querySelectorAll('#colours span')].filter(one => one.style.background).map(one => one.textContent).join('');";
    assert_eq!(browser.script(drawn, json!([])), Value::String(expected));
    let heights = "return [document.querySelector('#prompt').scrollHeight, document.querySelector('#colours').clientHeight];";
    let heights = browser.script(heights, json!([]));
    assert_eq!(heights[0], heights[1]);
    let tokens =
        server.post("/tokenize", &json!({ "prompt": browser.text("prompt") })).json()["count"].clone();
    browser.wait_for(&format!("return document.querySelector('#count').dataset.count === '{tokens}';"));
    assert_eq!(browser.text("count"), format!("{tokens} of 256 tokens"));
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

#[test]
fn the_seed_is_shown_and_a_text_is_taken_back_for_another_one() {
    let Some((server, browser)) = opened_as_it_is() else { return };
    browser.set("seed", "7");
    browser.set("max-new-tokens", "12");
    browser.type_into("prompt", "JULIET:");
    browser.click("write");
    browser.wait_for_status("ready");
    let first = browser.text("prompt");
    let body = json!({ "prompt": "JULIET:", "max_tokens": 12, "temperature": 0.8, "top_k": 50, "seed": 7 });
    let expected = server.post("/v1/completions", &body).json()["choices"][0]["text"].clone();
    assert_eq!(first, format!("JULIET:{}", expected.as_str().unwrap()));
    browser.click("regenerate");
    browser.wait_for_status("ready");
    let second = browser.text("prompt");
    assert!(second.starts_with("JULIET:") && second != first);
    assert_ne!(browser.text("seed"), "7");
    for (button, expected) in [("undo", "JULIET:"), ("undo", &first), ("undo", "JULIET:"), ("redo", &first)] {
        browser.click(button);
        assert_eq!(browser.text("prompt"), expected);
    }
    // Typing is undone by the keyboard as ever.
    browser.type_into("prompt", " more");
    browser.press(&[keys::CONTROL, 'z']);
    assert_eq!(browser.text("prompt"), first);
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

#[test]
fn a_text_that_is_stopped_midway_frees_its_row() {
    let Some((server, browser)) = opened_as_it_is() else { return };
    browser.set("max-new-tokens", "240");
    browser.set("temperature", "0");
    browser.type_into("prompt", "O");
    let stop_soon = "const find = name => document.querySelector(`[data-testid=${name}]`);
        const wait = () => { if (find('prompt').value.length > 8) find('stop').click(); else setTimeout(wait); };
        find('write').click(); wait();";
    browser.script(stop_soon, json!([]));
    browser.wait_for("return document.querySelector('#prompt').value.length > 8;");
    browser.wait_for_status("ready");
    server.wait_for_metric("gpt2_batch_rows", 0.0);
    assert_eq!(server.metric("gpt2_cancelled_total"), 1.0);
    let whole = greedy(&server, "O", 240);
    let written = browser.text("prompt");
    assert!(written.len() > 8 && written.len() < whole.len());
    assert!(format!("O{whole}").starts_with(&written));
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

#[test]
fn text_that_looks_like_html_is_text() {
    let Some((_server, browser)) = opened_as_it_is() else { return };
    let hostile = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>";
    write(&browser, hostile, 3);
    browser.click("score");
    browser.wait_for_status("ready");
    browser.set("n", "2");
    browser.click("write");
    browser.wait_for_status("ready");
    assert!(browser.text("prompt").starts_with(hostile));
    assert_eq!(browser.script("return document.title;", json!([])), "shakespeare · gpt2");
    let made = "return document.querySelectorAll('main img, main script').length;";
    assert_eq!(browser.script(made, json!([])), 0);
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

#[test]
fn pointing_at_a_token_shows_what_else_could_stand_there_and_a_click_goes_on_from_it() {
    let Some((server, browser)) = opened_as_it_is() else { return };
    write(&browser, "The king", 8);
    let body = json!({ "prompt": "The king", "max_tokens": 8, "temperature": 0, "logprobs": 10 });
    let choice = server.post("/v1/completions", &body).json()["choices"][0].clone();
    browser.point(&coloured(3), false);
    browser.wait_for("return !document.querySelector('#choices').hidden;");
    let shown = "return [...document.querySelectorAll('#choices [role=option]')].map(one => [one.firstChild.textContent, Number(one.lastChild.textContent)]);";
    let shown = browser.script(shown, json!([]));
    let shown = shown.as_array().unwrap();
    assert_eq!(shown.len(), 10);
    let shares: Vec<f64> = shown.iter().map(|bar| bar[1].as_f64().unwrap()).collect();
    assert!(shares.is_sorted_by(|a, b| a >= b) && shares.iter().sum::<f64>() <= 1.0005);
    let top = choice["logprobs"]["top_logprobs"][3].as_object().unwrap();
    let mut expected: Vec<f64> = top.values().map(|logprob| logprob.as_f64().unwrap().exp()).collect();
    expected.sort_by(|a, b| b.total_cmp(a));
    for (share, expected) in shares.iter().zip(&expected) {
        assert!((share - expected).abs() < 1e-4, "{share} {expected}");
    }
    // The second one takes the place of the fourth token, and the text goes on from there.
    let second = "return document.querySelectorAll('#choices [role=option]')[1];";
    browser.point(second, true);
    browser.wait_for_status("ready");
    let tokens = choice["logprobs"]["tokens"].as_array().unwrap();
    let kept: String = tokens[..3].iter().map(|token| token.as_str().unwrap()).collect();
    let (taken, _) = top.iter().find(|(_, logprob)| logprob.as_f64().unwrap().exp() == expected[1]).unwrap();
    let cut = format!("The king{kept}{taken}");
    assert_eq!(browser.text("prompt"), format!("{cut}{}", greedy(&server, &cut, 8)));
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

#[test]
fn everything_is_reached_by_keyboard_alone() {
    let Some((server, browser)) = opened_as_it_is() else { return };
    browser.set("temperature", "0");
    browser.set("max-new-tokens", "6");
    browser.type_into("prompt", "A horse");
    browser.press(&[keys::CONTROL, keys::ENTER]);
    browser.wait_for("return document.querySelector('#prompt').value.length > 7;");
    browser.wait_for_status("ready");
    let written = browser.text("prompt");
    assert_eq!(written, format!("A horse{}", greedy(&server, "A horse", 6)));
    // The token at the cursor, its alternatives, the one below the most probable one.
    let to_token =
        "const area = document.querySelector('#prompt'); area.focus(); area.setSelectionRange(7, 7);";
    browser.script(to_token, json!([]));
    browser.press(&[keys::ALT, keys::DOWN]);
    browser.wait_for("return document.activeElement.role === 'option';");
    browser.press(&[keys::ESCAPE]);
    browser.wait_for(
        "return document.querySelector('#choices').hidden && document.activeElement.id === 'prompt';",
    );
    browser.press(&[keys::ALT, keys::DOWN]);
    browser.press(&[keys::HOME]);
    browser.press(&[keys::DOWN]);
    let chosen = browser.script(
        "return document.activeElement.firstChild.textContent.replaceAll('·', ' ').replaceAll('↵', '\\n');",
        json!([]),
    );
    browser.press(&[keys::ENTER]);
    let cut = format!("A horse{}", chosen.as_str().unwrap());
    browser.wait_for(&format!("return document.querySelector('#prompt').value.length > {};", cut.len()));
    browser.wait_for_status("ready");
    assert_eq!(browser.text("prompt"), format!("{cut}{}", greedy(&server, &cut, 6)));
    // Another seed, and every control in the order of the tab key.
    browser.press(&[keys::CONTROL, keys::SHIFT, keys::ENTER]);
    browser.wait_for_status("ready");
    browser.script("document.querySelector('#write').focus();", json!([]));
    let mut reached = Vec::new();
    for _ in 0..22 {
        reached.push(
            browser.script("return document.activeElement.id || document.activeElement.tagName;", json!([])),
        );
        browser.press(&[keys::TAB]);
    }
    let expected = [
        "write",
        "again",
        "undo",
        "score",
        "prompt",
        "max-new-tokens",
        "temperature",
        "top-k",
        "top-p",
        "min-p",
        "repetition",
        "presence",
        "frequency",
        "n",
        "seed",
        "stops",
        "SUMMARY",
        "SUMMARY",
    ];
    let reached: Vec<&str> = reached.iter().map(|name| name.as_str().unwrap()).collect();
    assert_eq!(reached[..expected.len()], expected);
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

#[test]
fn a_text_is_scored_token_by_token() {
    let Some((server, browser)) = opened_as_it_is() else { return };
    let text = "To be, or not to be";
    browser.type_into("prompt", text);
    browser.click("score");
    browser.wait_for("return document.querySelector('#numbers').textContent.startsWith('perplexity');");
    let body = json!({ "prompt": text, "max_tokens": 0, "echo": true, "logprobs": 0 });
    let logprobs =
        server.post("/v1/completions", &body).json()["choices"][0]["logprobs"]["token_logprobs"].clone();
    let known: Vec<f64> = logprobs.as_array().unwrap().iter().filter_map(Value::as_f64).collect();
    let perplexity = (-known.iter().sum::<f64>() / known.len() as f64).exp();
    let shown = browser.text("numbers");
    let (shown, _) = shown.strip_prefix("perplexity ").unwrap().split_once(' ').unwrap();
    assert!((shown.parse::<f64>().unwrap() / perplexity - 1.0).abs() < 1e-3, "{shown} {perplexity}");
    let drawn =
        "return [...document.querySelectorAll('#colours span')].filter(one => one.style.background).length;";
    assert_eq!(browser.script(drawn, json!([])), known.len());
    assert_eq!(browser.text("prompt"), text);
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

#[test]
fn several_texts_stand_side_by_side_and_one_is_taken() {
    let Some((server, browser)) = opened_as_it_is() else { return };
    browser.set("n", "3");
    browser.set("seed", "11");
    browser.set("max-new-tokens", "10");
    browser.type_into("prompt", "Speak");
    browser.click("write");
    browser.wait_for_status("ready");
    let body =
        json!({ "prompt": "Speak", "max_tokens": 10, "temperature": 0.8, "top_k": 50, "seed": 11, "n": 3 });
    let choices = server.post("/v1/completions", &body).json()["choices"].clone();
    let shown = browser
        .script("return [...document.querySelectorAll('#texts p')].map(one => one.textContent);", json!([]));
    let expected: Vec<&Value> = choices.as_array().unwrap().iter().map(|choice| &choice["text"]).collect();
    assert_eq!(shown.as_array().unwrap().iter().collect::<Vec<_>>(), expected);
    browser.click("take-1");
    assert_eq!(browser.text("prompt"), format!("Speak{}", expected[1].as_str().unwrap()));
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

#[test]
fn a_key_is_asked_for_and_kept_in_memory_only() {
    let server = start_model(built_in(), "shakespeare", |options| options.keys = vec!["s3cret".into()]);
    let Some(browser) = Browser::open(&server.url(), 1200) else { return };
    assert_eq!(browser.wait_for_status("error"), "error: this server asks for a key");
    browser.type_into("key", "wrong\u{e007}");
    browser
        .wait_for("return document.querySelector('#status').textContent.includes('the key is not right');");
    browser.type_into("key", "s3cret");
    browser.click("key-use");
    browser.wait_for_status("ready");
    write(&browser, "Once", 4);
    assert!(browser.text("prompt").len() > 4);
    let kept = "return localStorage.length + sessionStorage.length + document.cookie.length + document.documentElement.outerHTML.includes('s3cret');";
    assert_eq!(browser.script(kept, json!([])), 0);
    browser.script("document.querySelector('#code').open = true;", json!([]));
    browser.wait_for("return document.querySelector('#request').textContent.includes('$OPENAI_API_KEY');");
}

#[test]
fn a_busy_server_and_one_that_is_gone_are_said_in_words() {
    let Some((server, browser)) = opened(|options| (options.parallel, options.queue) = (1, 1)) else {
        return;
    };
    browser.set("max-new-tokens", "4");
    browser.type_into("prompt", "Hark");
    let long = json!({ "prompt": "a", "max_tokens": 250, "ignore_eos": true, "stream": true, "n": 1 });
    let refused = (0..20).any(|_| {
        let others: Vec<_> = (0..4)
            .map(|_| {
                let mut client = server.connect();
                client.send(&json_request("/v1/completions", &long));
                client
            })
            .collect();
        browser.click("write");
        browser.wait_for("return !document.querySelector('#write').disabled;");
        drop(others);
        browser.text("status").starts_with("error: the server is busy")
    });
    assert!(refused, "{}", browser.text("status"));
    assert!(browser.text("status").contains("; try again in "), "{}", browser.text("status"));
    drop(server);
    let before = browser.text("prompt");
    browser.click("write");
    assert_eq!(browser.wait_for_status("error"), "error: the server does not answer; is it still running?");
    assert_eq!(browser.text("prompt"), before);
}

#[test]
fn settings_that_cannot_be_are_named() {
    let Some((_server, browser)) = opened_as_it_is() else { return };
    browser.set("temperature", "3");
    browser.click("write");
    assert_eq!(browser.wait_for_status("error"), "error: temperature: give a number from 0 to 2");
    browser.set("temperature", "1");
    browser.set("seed", "many");
    browser.click("write");
    assert_eq!(
        browser.wait_for_status("error: seed"),
        "error: seed: give a whole number up to 9007199254740991, or nothing for a new one"
    );
    browser.set("seed", "");
    browser.set("max-new-tokens", "1000");
    browser.click("write");
    assert!(browser.wait_for_status("error: ").contains("256"), "{}", browser.text("status"));
    let room = "room for 256 more; max tokens is 1000";
    browser.wait_for(&format!(
        "return document.querySelector('[data-testid=room]').textContent === {};",
        json!(room)
    ));
}

#[test]
fn the_request_is_shown_as_a_command_and_as_a_program() {
    let Some((_server, browser)) = opened_as_it_is() else { return };
    browser.set("seed", "5");
    browser.type_into("prompt", "It's \"so\"\n\u{1f600}");
    browser.script("document.querySelector('#code').open = true;", json!([]));
    browser.wait_for("return document.querySelector('#request').textContent.startsWith('curl');");
    let command = browser.text("request");
    let (_, body) = command.split_once("-d '").unwrap();
    let body: Value = serde_json::from_str(&body.strip_suffix('\'').unwrap().replace("'\\''", "'")).unwrap();
    let expected = json!({
        "model": "shakespeare", "prompt": "It's \"so\"\n\u{1f600}", "max_tokens": 100, "temperature": 0.8, "top_k": 50, "seed": 5,
        "logprobs": 10, "stream": true, "stream_options": { "include_usage": true },
    });
    assert_eq!(body, expected);
    browser.click("as-python");
    let program = browser.text("request");
    for line in [
        "client = OpenAI(base_url=\"http://127.0.0.1:",
        "    prompt=\"It's \\\"so\\\"\\n\u{1f600}\",",
        "    seed=5,",
        "    stream=True,",
        "    extra_body={\"top_k\": 50},",
    ] {
        assert!(program.contains(line), "{line}\n{program}");
    }
}

#[test]
fn attention_and_lens_of_the_text_are_drawn_on_demand() {
    let Some((_server, browser)) = opened_as_it_is() else { return };
    browser.type_into("prompt", "The quality of mercy");
    browser.script("document.querySelector('#inside').open = true;", json!([]));
    browser.click("attention");
    browser.wait_for("return document.querySelector('#report-name').textContent === 'layer 0, head 0';");
    let heads = "return document.querySelectorAll('.heads button').length;";
    let config = built_in().config().clone();
    assert_eq!(browser.script(heads, json!([])), config.n_layer * config.n_head);
    browser.type_into("layers", "1-2");
    browser.click("attention");
    browser.wait_for("return document.querySelector('#report-name').textContent === 'layer 1, head 0';");
    browser.click("lens");
    browser.wait_for("return document.querySelector('#report-title').textContent.startsWith('logit lens');");
    assert!(
        browser
            .script("return document.querySelector('#report-readout').textContent;", json!([]))
            .as_str()
            .unwrap()
            .contains("layer 0_pre")
    );
    browser.set("layers", "1-99");
    browser.click("attention");
    assert!(browser.wait_for_status("error: layers: ").contains("counted from 0 to"));
    assert_eq!(browser.complaints().iter().filter(|line| !line.contains("400")).count(), 0);
}

#[test]
fn a_head_is_computed_step_by_step() {
    let Some((server, browser)) = opened_as_it_is() else { return };
    let prompt = "The quality of mercy";
    browser.type_into("prompt", prompt);
    browser.script("document.querySelector('#inside').open = true;", json!([]));
    browser.click("head");
    let choose = "const [name, value] = arguments, list = document.querySelector(`#head-${name}`); list.value = value; list.onchange();";
    for (name, value, shown) in
        [("layer", 2, "layer 2:"), ("head", 5, "head 5 of"), ("query", 4, "much"), ("key", 1, "much")]
    {
        let drawn = format!(
            "const list = document.querySelector('#head-{name}'); return !list.disabled && list.options.length > {value};"
        );
        browser.wait_for(&drawn);
        browser.wait_for_status("ready");
        browser.script(choose, json!([name, value]));
        browser.wait_for(&format!("return document.querySelector('#head-{name}').value === '{value}' && document.querySelector('#head-title').textContent.includes('{shown}');"));
        browser.wait_for_status("ready");
    }
    let body = json!({ "prompt": prompt, "layer": 2, "head": 5, "query": 4, "key": 1 });
    let steps = server.post("/look/head", &body).json();
    let fixed = |value: &Value| format!("{:.4}", value.as_f64().unwrap());
    let title = format!(
        "How much \u{201c}{}\u{201d} attends to \u{201c}{}\u{201d} in head 5 of layer 2: {}",
        steps["tokens"][4].as_str().unwrap(),
        steps["tokens"][1].as_str().unwrap(),
        fixed(&steps["weights"][1])
    );
    browser
        .wait_for(&format!("return document.querySelector('#head-title').textContent === {};", json!(title)));
    // Every number of the context vector stands there.
    let last = "return [...[...document.querySelectorAll('#head-steps .vector')].at(-1).querySelectorAll('li')].map(one => one.textContent);";
    let expected: Vec<Value> =
        steps["context"].as_array().unwrap().iter().map(|value| Value::String(fixed(value))).collect();
    assert_eq!(browser.script(last, json!([])), Value::Array(expected));
    // The example of the articles, as they print it.
    browser.click("head-example");
    browser
        .wait_for("return document.querySelector('#head-title').textContent.endsWith('articles: 0.2264');");
    assert_eq!(browser.script(last, json!([])), json!(["0.3061", "0.8210"]));
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

#[test]
fn a_narrow_screen_needs_no_scrolling_sideways() {
    let server = start_model(built_in(), "shakespeare", |_| ());
    let Some(browser) = Browser::open(&server.url(), 320) else { return };
    browser.wait_for_status("ready");
    browser.set("n", "2");
    write(&browser, "averyveryverylongwordwithoutanyspacewhichwouldbewiderthanthescreen", 20);
    browser.script("document.querySelectorAll('details').forEach(one => one.open = true);", json!([]));
    browser.click("attention");
    browser.wait_for("return document.querySelector('#report-name').textContent !== '';");
    let wide = browser.script("return [document.documentElement.scrollWidth, innerWidth];", json!([]));
    assert!(wide[0].as_u64().unwrap() <= 320 && wide[1] == 320, "{wide}");
}
