//! Keyboard alone, narrow screens, light and dark.

use candle_gpt2_testing::{Browser, keys};
use serde_json::{Value, json};

use crate::common::{
    address, assert_quiet, built_in, choose, greedy, opened, set_all, write_greedily, written,
};

fn focused(browser: &Browser) -> String {
    let script = "return document.activeElement.dataset.testid ?? document.activeElement.id ?? '';";
    browser.script(script, json!([])).as_str().unwrap_or_default().to_owned()
}

#[test]
fn everything_is_reached_by_keyboard_alone() {
    let model = built_in(None);
    let Some(browser) = opened() else { return };
    set_all(&browser, &[("max-new-tokens", "8")]);
    choose(&browser, "greedy", true);
    browser.set("prompt", "A horse");
    browser.press(&[keys::CONTROL, keys::ENTER]);
    browser.wait_for_status("ready");
    let text = browser.text("text");
    assert_eq!(text, written(&model, "A horse", greedy(8)));
    // From the first control on, the tab key reaches every one that can be used.
    browser.script("document.querySelector('[data-testid=tour]').focus();", json!([]));
    let mut reached = vec![focused(&browser)];
    for _ in 0..60 {
        browser.press(&[keys::TAB]);
        reached.push(focused(&browser));
    }
    for name in [
        "tour",
        "prompt",
        "write",
        "go-on",
        "anew",
        "show-bits",
        "greedy",
        "max-new-tokens",
        "seed",
        "new-seed",
        "attention",
        "head",
        "lens",
        "layers",
        "command",
        "copy",
        "copy-link",
        "start-over",
        "model-file",
        "model-folder",
        "dtype",
    ] {
        assert!(reached.iter().any(|one| one == name), "{name} is not among {reached:?}");
    }
    // The text is one stop, from which arrow keys go from token to token.
    browser.script("document.querySelector('[data-testid=text] [tabindex=\"0\"]').focus();", json!([]));
    browser.press(&[keys::HOME]);
    let index =
        "return [...document.querySelectorAll('[data-testid=text] span')].indexOf(document.activeElement);";
    let before = browser.script(index, json!([])).as_i64().unwrap();
    browser.press(&[keys::RIGHT]);
    let after = browser.script(index, json!([])).as_i64().unwrap();
    assert!(before >= 0 && after == before + 1, "{before} {after}");
    browser.press(&[keys::ALT, keys::DOWN]);
    browser.wait_for("return document.activeElement.role === 'option' && !document.querySelector('[data-testid=alternatives]').hidden;");
    browser.press(&[keys::ESCAPE]);
    browser.wait_for("return document.querySelector('[data-testid=alternatives]').hidden;");
    assert_eq!(browser.script(index, json!([])).as_i64(), Some(after));
    // The tour: six steps, and out again.
    browser.script("document.querySelector('[data-testid=tour]').focus();", json!([]));
    browser.press(&[keys::ENTER]);
    let title = "return document.querySelector('#tour-title').textContent;";
    for step in 1..=6 {
        let title = browser.script(title, json!([]));
        assert!(title.as_str().unwrap().starts_with(&format!("{step} of 6: ")), "{title}");
        browser.script("document.querySelector('[data-testid=tour-panel] .main').focus();", json!([]));
        browser.press(&[keys::ENTER]);
    }
    browser.wait_for("return document.querySelector('[data-testid=tour-panel]').hidden;");
    assert_eq!(focused(&browser), "tour");
    assert_quiet(&browser);
}

#[test]
fn a_narrow_screen_needs_no_scrolling_sideways() {
    let Some(url) = address("") else { return };
    let Some(browser) = Browser::open(&url, 360) else { return };
    browser.wait_for_status("ready");
    let prompt = "averyveryverylongwordwithoutanyspacewhichwouldbewiderthanthescreen".repeat(2);
    write_greedily(&browser, &prompt, 20);
    browser.script("document.querySelectorAll('details').forEach(one => one.open = true);", json!([]));
    for view in ["attention", "lens", "head"] {
        browser.click(view);
        browser.wait_for("return document.querySelector('[data-testid=inside-error]').textContent === '';");
        let drawn = "return document.querySelector('#report-name').textContent !== '' || document.querySelectorAll('[data-testid=steps] > li').length === 6;";
        browser.wait_for(drawn);
        let width = browser.script("return [document.documentElement.scrollWidth, innerWidth];", json!([]));
        assert!(width[0].as_u64().unwrap() <= 360 && width[1] == 360, "{view}: {width}");
    }
    browser.click("tour");
    let width = browser.script("return document.documentElement.scrollWidth;", json!([]));
    assert!(width.as_u64().unwrap() <= 360, "the tour: {width}");
    assert_quiet(&browser);
}

/// The contrast of text and what is behind it, by WCAG, of each part; only what is drawn on a plain colour.
const CONTRASTS: &str = "
    const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
    const light = colour => numbers(colour).slice(0, 3).map(one => one / 255)
        .map(one => one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)
        .reduce((sum, one, n) => sum + one * [0.2126, 0.7152, 0.0722][n], 0);
    const behind = part => {
        for (; part; part = part.parentElement) {
            const colour = getComputedStyle(part).backgroundColor;
            if ((numbers(colour)[3] ?? 1) === 1) return colour;
        }
        return 'rgb(255, 255, 255)';
    };
    return arguments[0].map(name => {
        const part = document.querySelector(`[data-testid=${name}]`);
        const both = [getComputedStyle(part).color, behind(part)].map(light).sort((a, b) => b - a);
        return [name, (both[0] + 0.05) / (both[1] + 0.05), light(behind(part))];
    });";

#[test]
fn it_is_read_in_light_and_in_dark() {
    let Some(browser) = opened() else { return };
    for (scheme, is_dark) in [("light", false), ("dark", true)] {
        let features = json!({ "features": [{ "name": "prefers-color-scheme", "value": scheme }] });
        browser.devtools("Emulation.setEmulatedMedia", features);
        browser.wait_for(&format!("return matchMedia('(prefers-color-scheme: {scheme})').matches;"));
        let names = [
            "prompt", "text", "status", "write", "stop", "seed", "command", "memory", "about", "numbers",
            "dtype",
        ];
        let found = browser.script(CONTRASTS, json!([names]));
        for part in found.as_array().unwrap() {
            let (contrast, light) = (part[1].as_f64().unwrap(), part[2].as_f64().unwrap());
            // A button that cannot be pressed may be faint.
            assert!(contrast >= 4.5 || part[0] == "stop", "{scheme}: {part}");
            // The one button that stands out is light in the dark.
            assert!(part[0] == "write" || (light < 0.2) == is_dark, "{scheme}: {part}");
        }
        // Where tokens are coloured, their own letters stay readable.
        let tokens = "return [...document.querySelectorAll('[data-testid=text] span')].filter(one => one.style.background).length;";
        assert!(browser.script(tokens, json!([])).as_u64().unwrap() > 3);
    }
    assert_quiet(&browser);
}

/// What colours say is also there in words and numbers.
#[test]
fn no_information_is_in_colours_alone() {
    let Some(browser) = opened() else { return };
    let names = "return [...document.querySelectorAll('[data-testid=text] span')].map(one => [one.ariaLabel, one.dataset.bits]);";
    let names = browser.script(names, json!([]));
    let names = names.as_array().unwrap();
    assert!(names.len() > 10);
    for name in names {
        let (label, bits) = (name[0].as_str().unwrap(), &name[1]);
        assert!(label.ends_with(" bits") && label.contains('%'), "{name}");
        assert_ne!(*bits, Value::Null, "{name}");
    }
    let unnamed = "return [...document.querySelectorAll('button, input, select, textarea')]
        .filter(one => one.offsetParent && !one.textContent.trim() && !one.ariaLabel && !one.title && !one.labels?.length).map(one => one.outerHTML);";
    assert_eq!(browser.script(unnamed, json!([])), json!([]));
    assert_quiet(&browser);
}
