//! Browser tests of pages: contents, no errors and no requests.
//!
//! They need Chromium. Without it, each test reports that it was skipped.

use candle_gpt2_pictures::{Axis, Report, feature_page, graph_page, page};
use candle_gpt2_testing::page_in_browser;

use crate::samples;

/// DOM of a report's page after its script ran, see [`page_in_browser`].
fn opened(report: &Report, fragment: &str, after: &str) -> Option<String> {
    page_in_browser(&page(report), fragment, after)
}

/// Text of the element with this `id`, with entities as in the file.
fn text<'a>(dom: &'a str, id: &str) -> &'a str {
    let (_, after) = dom.split_once(&format!("id=\"{id}\"")).unwrap();
    after.split_once('>').unwrap().1.split_once('<').unwrap().0.trim_end()
}

/// Cells of the value table by row, without labels.
fn cells(dom: &str) -> Vec<Vec<String>> {
    let (_, table) = dom.split_once("<table>").unwrap();
    let (table, _) = table.split_once("</table>").unwrap();
    let row = |row: &str| {
        row.split("<td>").skip(1).map(|cell| cell.split('<').next().unwrap().to_owned()).collect()
    };
    table.split("<tr>").skip(2).map(row).collect()
}

/// Parses a percentage with at most three digits as a fraction.
fn fraction(cell: &str) -> f32 {
    if cell == "&lt; 0.01%" {
        return 0.0;
    }
    cell.strip_suffix('%').unwrap_or_else(|| panic!("{cell} is not a percentage")).parse::<f32>().unwrap()
        / 100.0
}

#[test]
fn attention_page_shows_the_head_from_the_url() {
    let report = samples::attention(3, 4, samples::sentence());
    let Some(dom) = opened(&report, "layer=2&head=1&row=5&column=3", "") else { return };
    let len = report.tokens.len();
    let head = &report.values[9 * len * len..10 * len * len];
    for (query, row) in cells(&dom).iter().enumerate() {
        assert_eq!(row.len(), len);
        for (key, cell) in row.iter().enumerate() {
            match head[query * len + key] {
                None => assert_eq!(cell, "masked"),
                Some(expected) => assert!(
                    (fraction(cell) - expected).abs() < 1e-4 + 0.005 * expected,
                    "{query}, {key}: {cell}, expected {expected}"
                ),
            }
        }
    }
    assert_eq!(cells(&dom).len(), len);
    assert_eq!(text(&dom, "report-name"), "layer 2, head 1");
    let readout = text(&dom, "report-readout");
    let value = readout.strip_prefix("query ·went\u{200e} 5 → key ·and\u{200e} 3: ").unwrap();
    assert!((fraction(value) - head[5 * len + 3].unwrap()).abs() < 1e-3, "{readout}");

    assert_eq!(dom.matches("aria-pressed=\"true\"").count(), 1);
    assert_eq!(dom.matches("aria-pressed=\"false\"").count(), 11);
}

#[test]
fn arrow_keys_select_heads_and_cells_and_update_the_url() {
    let mut report = samples::attention(2, 3, samples::sentence());
    let len = report.tokens.len();
    report.values[len * len..2 * len * len].fill(None);
    let script = "
        const press = (target, key) => target.dispatchEvent(new KeyboardEvent('keydown', { key, cancelable: true }));
        press(document.querySelector('.heads [aria-pressed=true]'), 'ArrowRight');
        press(document.querySelector('.heads [aria-pressed=true]'), 'ArrowDown');
        for (const key of ['ArrowDown', 'ArrowDown', 'ArrowRight']) press(document.querySelector('.cells'), key);
        press(document.querySelector('.cells'), 'End');
        press(document.querySelector('.cells'), 'ArrowLeft');
        press(document.querySelector('.line [aria-current]'), 'ArrowRight');
        document.body.dataset.address = location.hash";
    let Some(dom) = opened(&report, "layer=0&head=0", script) else { return };
    // Head 1 of layer 0 is missing. The token line moves to the next query, and the key stays within it.
    assert_eq!(text(&dom, "report-name"), "layer 1, head 2");
    assert!(dom.contains("data-address=\"#layer=1&amp;head=2&amp;row=3&amp;column=3\""));
    assert!(text(&dom, "report-readout").starts_with("query ·and\u{200e} 3 → key ·and\u{200e} 3: "));
}

#[test]
fn first_column_can_be_hidden() {
    let report = samples::attention(1, 2, samples::sentence());
    let Some(dom) = opened(&report, "row=4&first=hidden", "") else { return };
    assert!(cells(&dom).iter().all(|row| row[0] == "masked"));
    assert!(text(&dom, "report-readout").ends_with(": hidden"));
    assert!(dom.contains("type=\"checkbox\""));
}

/// Checks that without a URL fragment, the page selects the head with the clearest role.
///
/// It selects that head's strongest cell and describes the role.
#[test]
fn attention_page_opens_on_the_head_with_the_clearest_role() {
    let mut report = samples::attention(2, 2, samples::sentence());
    let len = report.tokens.len();
    // Head 1 of layer 1 attends to the previous token; the others spread their attention.
    for query in 0..len {
        for key in 0..=query {
            for head in 0..4 {
                report.values[(head * len + query) * len + key] = Some(1.0 / (query + 1) as f32);
            }
            let before = if key + 1 == query { 0.9 } else { 0.1 / query.max(1) as f32 };
            report.values[(3 * len + query) * len + key] = Some(if query == 0 { 1.0 } else { before });
        }
    }
    let Some(dom) = opened(&report, "", "") else { return };
    assert_eq!(text(&dom, "report-name"), "layer 1, head 1");
    let role = text(&dom, "report-role");
    assert!(
        role.starts_with("90% of this head's attention goes to the token just before, for example “"),
        "{role}"
    );
    assert!(text(&dom, "report-readout").ends_with(": 90%"));
    let Some(dom) = opened(&report, "layer=0&head=1", "") else { return };
    assert!(text(&dom, "report-role").starts_with("This head divides its attention"));
}

#[test]
fn long_text_shows_the_strongest_sources_of_one_row() {
    let report = samples::attention(8, 6, samples::repeated(300));
    let Some(dom) = opened(&report, "layer=7&head=5&row=200", "") else { return };
    assert!(text(&dom, "report-about").contains("the 8 strongest sources of each token"));
    let rows = cells(&dom);
    assert_eq!(rows.len(), 1, "only the selected row");
    let head = &report.values[(47 * 300 + 200) * 300..][..300];
    let visible: Vec<usize> = (0..300).filter(|key| rows[0][*key] != "masked").collect();
    assert_eq!(visible.len(), 8);
    for key in visible {
        let shown = fraction(&rows[0][key]);
        assert!((shown - head[key].unwrap()).abs() < 0.003, "{key}: {shown}");
    }
}

#[test]
fn lens_page_lists_the_last_layer_first() {
    let report = samples::lens(4, samples::sentence());
    let Some(dom) = opened(&report, "row=3&column=1", "") else { return };
    let columns = report.tokens.len();
    let expected: Vec<Vec<String>> = (0..4)
        .rev()
        .map(|row| {
            let cell = |column: usize| {
                let index = row * columns + column;
                let text = report.texts[index].replace('<', "&lt;").replace('>', "&gt;");
                format!("{}% {text}", (report.values[index].unwrap() * 100.0).round())
            };
            (0..columns).map(cell).collect()
        })
        .collect();
    assert_eq!(cells(&dom), expected);
    assert_eq!(text(&dom, "report-readout"), "layer 3, token When\u{200e} 1: 69%  ·the");
}

#[test]
fn bars_page_shows_each_label_with_its_value() {
    let tokens = samples::sentence();
    let report = samples::bars(Axis::tokens("token", &tokens), tokens);
    let Some(dom) = opened(&report, "row=3", "") else { return };
    assert_eq!(dom.matches("role=\"option\"").count(), 12);
    assert_eq!(text(&dom, "report-readout"), "·and\u{200e} 3: 1.25");
    let expected: Vec<String> = report.values.iter().map(|value| value.unwrap().to_string()).collect();
    assert_eq!(cells(&dom), [expected]);
    assert_eq!(dom.matches("aria-current=\"true\"").count(), 1);
}

#[test]
fn third_axis_is_selected_from_a_list() {
    let report = samples::three_axes();
    let script = "
        const list = document.querySelector('select');
        list.value = 1;
        list.dispatchEvent(new Event('change'))";
    let Some(dom) = opened(&report, "site=attention", script) else { return };
    assert_eq!(text(&dom, "report-name"), "site mlp");
    // In a layer-by-token table, the first layer is the lowest row.
    assert_eq!(cells(&dom).last().unwrap()[0], report.values[36].unwrap().to_string());
}

#[test]
fn hostile_texts_are_displayed_as_text() {
    for mut report in [
        samples::attention(1, 1, samples::hostile()),
        samples::lens(3, samples::hostile()),
        samples::bars(Axis::tokens("token", &samples::hostile()), samples::hostile()),
    ] {
        report.title = "<img onerror=alert(1)>".into();
        report.notes = vec!["</li><script>alert(1)</script>".into()];
        let Some(dom) = opened(&report, "row=1", "") else { return };
        assert_eq!(text(&dom, "title"), "&lt;img onerror=alert(1)&gt;");
        // Three scripts are expected: the data, the page's script and the test's.
        assert_eq!(dom.matches("<script").count(), 3);
        assert!(dom.contains("<li>&lt;/li&gt;&lt;script&gt;alert(1)&lt;/script&gt;</li>"));
        assert!(dom.contains("<th>&amp;lt;b&amp;gt;\u{200e} 1</th>"));
        assert!(dom.contains("\\xE2\\x82\u{200e} 2") && dom.contains("\\x1B[31m\u{200e} 3"));
        assert!(dom.contains("@@style@@\u{200e} 11"));
    }
}

#[test]
fn size_mismatch_is_displayed_on_the_page() {
    let mut report = samples::layers_by_heads(2, 3);
    report.values.pop();
    let Some(dom) = opened(&report, "", "") else { return };
    assert!(dom.contains("<li>a report with axes (layer 2, head 3) cannot have 5 values"));
}

/// Labels of the buttons in the element with this `id`.
fn buttons(dom: &str, id: &str) -> Vec<String> {
    let (_, after) = dom.split_once(&format!("id=\"{id}\"")).unwrap();
    let (inside, _) = after.split_once("</div>").unwrap();
    let button = |part: &str| part.split_once('>').unwrap().1.split('<').next().unwrap().to_owned();
    inside.split("<button").skip(1).map(button).collect()
}

#[test]
fn graph_page_shows_the_edges_of_the_selected_node() {
    let (report, graph) = samples::attribution_graph();
    let Some(dom) = page_in_browser(&graph_page(&report, &graph), "node=0_7_2", "") else { return };
    assert_eq!(text(&dom, "graph-name"), "node 0_7_2");
    assert_eq!(buttons(&dom, "graph-in"), ["+2  node E_1_2", "−0.5  node P_2_2"]);
    assert_eq!(buttons(&dom, "graph-out"), ["+1.5  node 3_5_11"]);
    assert_eq!(dom.matches("<circle").count(), 5);
    // Without a URL fragment, the first logit is selected.
    let Some(dom) = page_in_browser(&graph_page(&report, &graph), "", "") else { return };
    assert_eq!(text(&dom, "graph-name"), "node 3_5_11");
}

#[test]
fn keyboard_selects_pins_and_groups_nodes_and_updates_the_url() {
    let (report, graph) = samples::attribution_graph();
    let script = "
        const press = key => document.activeElement.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true, cancelable: true }));
        document.querySelector('circle.logit').focus();
        press('p');
        press('ArrowDown');
        press('ArrowLeft');
        press('p');
        const group = document.getElementById('graph-group');
        group.value = 'one';
        group.dispatchEvent(new Event('change'));
        document.querySelector('circle[tabindex=\"0\"]').focus();
        press('ArrowDown');
        press('p');
        document.body.dataset.address = location.hash";
    let Some(dom) = page_in_browser(&graph_page(&report, &graph), "", script) else { return };
    assert_eq!(text(&dom, "graph-name"), "node E_1_2");
    assert_eq!(buttons(&dom, "graph-pinned"), ["3_5_11", "0_7_2", "E_1_2"]);
    let pinned = dom.split_once("id=\"graph-pinned\"").unwrap().1;
    assert!(
        pinned.contains("one → node 3_5_11: +1.5<") && pinned.contains("node E_1_2 → one: +2<"),
        "{pinned}"
    );
    let address = "#node=E_1_2&amp;pinned=3_5_11%2C0_7_2%2CE_1_2&amp;group.one=0_7_2";
    assert!(dom.contains(&format!("data-address=\"{address}\"")), "{dom}");
    // The URL fragment restores the whole selection.
    let fragment = address[1..].replace("&amp;", "&");
    let Some(again) = page_in_browser(&graph_page(&report, &graph), &fragment, "") else { return };
    assert_eq!(buttons(&again, "graph-pinned"), ["3_5_11", "0_7_2", "E_1_2"]);
    assert_eq!(text(&again, "graph-name"), "node E_1_2");
}

#[test]
fn graph_tokens_cannot_break_the_page() {
    let (mut report, graph) = samples::attribution_graph();
    report.tokens = samples::hostile();
    let Some(dom) = page_in_browser(&graph_page(&report, &graph), "node=err_0_4", "") else { return };
    assert_eq!(buttons(&dom, "graph-out"), ["−0.25  node 3_5_11"]);
}

/// Name, description and texts of the selected feature.
fn feature(dom: &str) -> (String, String, &str) {
    let (_, texts) = dom.split_once("id=\"feature-texts\"").unwrap();
    (
        text(dom, "feature-name").to_owned(),
        text(dom, "feature-about").to_owned(),
        texts.split_once("</section>").unwrap().0,
    )
}

#[test]
fn feature_page_shows_the_texts_of_the_selected_feature() {
    let (report, cards) = samples::features(&samples::sentence());
    let page = feature_page(&report, &cards);
    let Some(dom) = page_in_browser(&page, "", "") else { return };
    let (name, about, texts) = feature(&dom);
    assert_eq!(
        (&name[..], &about[..]),
        ("feature 17", "active at 12.5% of the tokens, with activations from 0.5 to 3")
    );
    let headings: Vec<&str> =
        texts.split("<h3>").skip(1).map(|part| part.split_once("</h3>").unwrap().0).collect();
    assert_eq!(headings, ["Top activations", "Weakest quarter"]);
    // Each text has its strength and all its tokens, one of them colored and marked.
    let lines: Vec<&str> = texts.split("<p ").skip(1).collect();
    assert_eq!(lines.len(), 3);
    for (line, (value, token)) in lines.iter().zip([("3", "·Mary"), ("2.25", "·John"), ("0.5", "When")]) {
        assert!(line.contains(&format!("<small>{value}</small>")), "{line}");
        assert_eq!((line.matches("<span").count(), line.matches("background").count()), (12, 1));
        let (_, marked) = line.split_once("class=\"strongest\"").unwrap();
        assert!(marked.split_once('>').unwrap().1.starts_with(&format!("{token}</span>")), "{marked}");
    }
    let (_, logits) = dom.split_once("id=\"feature-logits\"").unwrap();
    let (logits, _) = logits.split_once("</dl>").unwrap();
    assert!(
        logits.contains(
            "<dt>makes more probable</dt><dd><span>&lt;|endoftext|&gt;</span><span>When</span></dd>"
        ),
        "{logits}"
    );
    let (_, bars) = dom.split_once("id=\"feature-histogram\"").unwrap();
    let (bars, _) = bars.split_once("</details>").unwrap();
    assert_eq!(bars.matches("role=\"option\"").count(), 7);
    assert!(bars.contains("<span>2 to 2.5</span>"), "{bars}");
}

#[test]
fn url_and_bars_select_a_feature() {
    let (report, cards) = samples::features(&samples::hostile());
    let page = feature_page(&report, &cards);
    let Some(dom) = page_in_browser(&page, "row=1", "") else { return };
    let (name, about, texts) = feature(&dom);
    assert_eq!((&name[..], &about[..]), ("feature 40", "not active in these texts"));
    assert_eq!(texts.matches("<p").count(), 0);
    let script = "
        document.querySelectorAll('#report-picture [role=option]')[0].click();
        document.body.dataset.address = location.hash";
    let Some(dom) = page_in_browser(&page, "row=1", script) else { return };
    assert_eq!(feature(&dom).0, "feature 17");
    assert!(dom.contains("data-address=\"#row=0\""));
    // Example texts are shown literally, not interpreted as HTML.
    assert!(feature(&dom).2.contains("&lt;/script&gt;&lt;script&gt;alert(1)&lt;/script&gt;"));
    assert_eq!(dom.matches("<script").count(), 3);
}
