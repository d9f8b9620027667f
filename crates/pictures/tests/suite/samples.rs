//! Sample reports with known values.

use candle_gpt2_pictures::{
    AttributionGraph, Axis, FeatureCard, FeatureHistogram, FeatureQuantile, FeatureText, Graph, GraphLine,
    GraphLink, GraphNode, GraphPoint, Metric, PointKind, Report, Scale, Token,
};

/// Tokens of a short sentence.
pub(crate) fn sentence() -> Vec<Token> {
    let texts = [
        "<|endoftext|>",
        "When",
        " John",
        " and",
        " Mary",
        " went",
        " to",
        " the",
        " store",
        ",",
        " John",
        " gave",
    ];
    tokens(texts.map(str::as_bytes))
}

/// Tokens that could break a page, a picture or a terminal.
pub(crate) fn hostile() -> Vec<Token> {
    tokens([
        b"</script><script>alert(1)</script>".as_slice(),
        b"&lt;b&gt;",
        b"\xe2\x82",
        b"\x1b[31m",
        "\u{202e}שלום".as_bytes(),
        b"\"'`${1}",
        b"\n",
        b" ",
        b"<!--",
        b"]]>\xff",
        "東京".as_bytes(),
        b"@@style@@",
        b"\\u003c",
    ])
}

pub(crate) fn repeated(len: usize) -> Vec<Token> {
    (0..len).map(|index| Token::new(index, 262, b" the")).collect()
}

pub(crate) fn tokens<'a>(texts: impl IntoIterator<Item = &'a [u8]>) -> Vec<Token> {
    texts
        .into_iter()
        .enumerate()
        .map(|(index, text)| Token::new(index, u32::try_from(index).unwrap(), text))
        .collect()
}

/// Attention with known weights that decrease with distance and differ between heads.
pub(crate) fn attention(layers: usize, heads: usize, tokens: Vec<Token>) -> Report {
    let len = tokens.len();
    let mut values = Vec::with_capacity(layers * heads * len * len);
    for head in 0..layers * heads {
        for query in 0..len {
            let weight =
                |key: usize| if key == 0 { 2.0 } else { 1.0 / (1.0 + query.abs_diff(key + head % 5) as f32) };
            let sum: f32 = (0..=query).map(weight).sum();
            values.extend((0..len).map(|key| (key <= query).then(|| weight(key) / sum)));
        }
    }
    Report {
        schema: "gpt2.look.attention/1".into(),
        title: "attention".into(),
        model: "gpt2".into(),
        bos: true,
        axes: vec![
            Axis::numbers("layer", 0..layers),
            Axis::numbers("head", 0..heads),
            Axis::tokens("query", &tokens),
            Axis::tokens("key", &tokens),
        ],
        tokens,
        values,
        texts: Vec::new(),
        metric: None,
        notes: vec!["A head's shares add up to 1.".into()],
        scale: Scale::Share,
        graph: None,
    }
}

/// Layers by tokens, with the most probable token in each cell.
pub(crate) fn lens(layers: usize, tokens: Vec<Token>) -> Report {
    let cells = layers * tokens.len();
    let words = [" is", " the", "\n", " Mary", " store", "<|endoftext|>", "ually", "</b>"];
    Report {
        schema: "gpt2.look.lens/1".into(),
        title: "logit lens".into(),
        model: "gpt2".into(),
        bos: false,
        axes: vec![Axis::numbers("layer", 0..layers), Axis::tokens("token", &tokens)],
        tokens,
        values: (0..cells).map(|cell| Some((cell * 37 % 100) as f32 / 100.0)).collect(),
        texts: (0..cells)
            .map(|cell| candle_gpt2_pictures::printable_token(words[cell * 5 % words.len()].as_bytes()))
            .collect(),
        metric: None,
        notes: vec!["Each layer's residual stream, read as if it were the last.".into()],
        scale: Scale::Share,
        graph: None,
    }
}

/// Signed values by layer and head.
pub(crate) fn layers_by_heads(layers: usize, heads: usize) -> Report {
    let value = |cell: usize| if cell == 7 { None } else { Some((cell * 29 % 101) as f32 / 25.0 - 2.0) };
    Report {
        schema: "gpt2.look.ablate/1".into(),
        title: "logit difference after removing each head".into(),
        model: "gpt2".into(),
        tokens: sentence(),
        bos: true,
        axes: vec![Axis::numbers("layer", 0..layers), Axis::numbers("head", 0..heads)],
        values: (0..layers * heads).map(value).collect(),
        texts: Vec::new(),
        metric: Some(Metric { name: "logit difference".into(), before: 3.25, after: Some(-0.5) }),
        notes: Vec::new(),
        scale: Scale::Signed,
        graph: None,
    }
}

/// A signed value for each label.
pub(crate) fn bars(axis: Axis, tokens: Vec<Token>) -> Report {
    Report {
        schema: "gpt2.look.saliency/1".into(),
        title: "saliency".into(),
        model: "gpt2".into(),
        tokens,
        bos: false,
        values: (0..axis.labels.len()).map(|index| Some((index * 7 % 11) as f32 / 4.0 - 1.25)).collect(),
        axes: vec![axis],
        texts: Vec::new(),
        metric: None,
        notes: Vec::new(),
        scale: Scale::Signed,
        graph: None,
    }
}

/// Three axes: site, layer and token.
pub(crate) fn three_axes() -> Report {
    let tokens = sentence();
    let runs = Axis::new("site", ["attention", "mlp"]);
    let mut report = layers_by_heads(2 * 3, tokens.len());
    report.axes = vec![runs, Axis::new("layer", ["0", "0_mid", "1"]), Axis::tokens("token", &tokens)];
    report.tokens = tokens;
    report
}

fn node(label: &str, row: usize, column: f64) -> GraphNode {
    GraphNode { label: label.to_owned(), row, column }
}

fn link(from: usize, to: usize, weight: f32) -> GraphLink {
    GraphLink { from, to, port: None, weight }
}

/// A graph with three values.
pub(crate) fn graph() -> Report {
    let nodes = vec![
        node("input", 0, 0.5),
        node("a0.h0", 1, 0.25),
        node("a0.h2", 1, 0.75),
        node("m0", 2, 0.5),
        node("logits", 3, 0.5),
    ];
    let links = vec![
        link(0, 1, 2.0),
        link(0, 2, 0.1),
        link(1, 3, -0.5),
        link(2, 3, 0.25),
        GraphLink { port: Some('v'), ..link(3, 4, -1.5) },
    ];
    Report { graph: Some(Graph { nodes, links }), ..bars(Axis::numbers("share", 0..3), sentence()) }
}

/// A graph with a single link, which ends at this port of a node.
pub(crate) fn graph_with_port(port: Option<char>) -> Report {
    let nodes = vec![node("input", 0, 0.5), node("a0.h0", 1, 0.5)];
    Report { graph: Some(Graph { nodes, links: vec![GraphLink { port, ..link(0, 1, 1.0) }] }), ..graph() }
}

/// A graph of a few nodes over the tokens of a sentence, with edges to later rows.
pub(crate) fn attribution_graph() -> (Report, AttributionGraph) {
    let mut report = attention(1, 1, sentence());
    report.title = "attribution graph".into();
    let point = |id: &str, kind, row, column, influence| GraphPoint {
        id: id.into(),
        name: format!("node {id}"),
        kind,
        row,
        column,
        influence,
        share: 0.5,
        activation: None,
        zeroed: None,
        card: None,
        command: None,
    };
    let points = vec![
        point("E_1_2", PointKind::Embedding, 0, 2, 0.2),
        point("P_2_2", PointKind::Position, 0, 2, 0.1),
        point("0_7_2", PointKind::Feature, 1, 2, 0.5),
        point("err_0_4", PointKind::Error, 1, 4, 0.3),
        point("3_5_11", PointKind::Logit, 2, 11, 0.0),
    ];
    let line = |source, target, weight| GraphLine { source, target, weight };
    let lines = vec![line(0, 2, 2.0), line(1, 2, -0.5), line(2, 4, 1.5), line(3, 4, -0.25)];
    (
        report,
        AttributionGraph {
            rows: ["embeddings", "layer 0", "logits"].map(String::from).to_vec(),
            points,
            lines,
        },
    )
}

/// A bar report on two features in a sentence; the second feature is never active.
pub(crate) fn features(tokens: &[Token]) -> (Report, Vec<FeatureCard>) {
    let texts: Vec<String> = tokens.iter().map(|token| token.text.clone()).collect();
    let example = |strongest: usize, value: f32| {
        let mut values = vec![0.0; texts.len()];
        values[strongest] = value;
        FeatureText {
            tokens: texts.clone(),
            tokens_acts_list: values,
            train_token_ind: strongest,
            is_repeated_datapoint: false,
        }
    };
    let quantile = |name: &str, examples| FeatureQuantile { quantile_name: name.into(), examples };
    let card = |index, density, act_max, counts, examples_quantiles| FeatureCard {
        index,
        density,
        act_min: 0.5,
        act_max,
        histogram: FeatureHistogram { bin_width: 0.5, counts },
        top_logits: texts[..2].to_vec(),
        bottom_logits: texts[2..4].to_vec(),
        examples_quantiles,
    };
    let quantiles = vec![
        quantile("Top activations", vec![example(4, 3.0), example(2, 2.25)]),
        quantile("Weakest quarter", vec![example(1, 0.5)]),
    ];
    let cards = vec![
        card(17, 0.125, 3.0, vec![0, 1, 0, 0, 4, 0, 1], quantiles),
        card(40, 0.0, 0.0, Vec::new(), vec![quantile("Top activations", Vec::new())]),
    ];
    let mut report = bars(Axis::numbers("feature", [17, 40]), Vec::new());
    report.values = vec![Some(0.125), Some(0.0)];
    (report, cards)
}
