//! Renders a report as plain text for a terminal, at most about a hundred columns wide.

use crate::report::{printable, short, shortened};
use crate::{Report, Scale};

/// Maximum width of a line, in characters.
const WIDTH: usize = 100;
/// Maximum length of a label.
const LABEL: usize = 24;
/// Maximum length of a label above a column.
const COLUMN_LABEL: usize = 12;
/// Maximum number of values listed for one axis; if there are more, the strongest are listed.
const LINES: usize = 40;
/// Number of strongest cells listed for reports with several axes.
const CELLS: usize = 30;
/// Maximum number of tokens listed.
const TOKENS: usize = 200;

/// Renders a report as text: model, tokens with their indices, values and notes.
///
/// Output that is too wide for a terminal is reduced to the strongest values, and the text states this.
///
/// ```
/// use candle_gpt2_pictures::{Axis, Report, table};
///
/// let mut report = Report::new("example", "shares".into(), "gpt2".into(), Vec::new(), false);
/// report.axes = vec![Axis::new("part", ["attention", "MLP"])];
/// report.values = vec![Some(0.25), Some(0.75)];
/// let text = table(&report);
/// assert_eq!(text.lines().last(), Some("      MLP      0.750"));
/// ```
pub fn table(report: &Report) -> String {
    let mut lines = vec![printable(&report.title)];
    if !report.model.is_empty() {
        lines.push(format!("model: {}", printable(&report.model)));
    }
    if let Some(metric) = &report.metric {
        let after = metric.after.map(|after| format!(" → {after:.5}")).unwrap_or_default();
        lines.push(format!("{}: {:.5}{after}", printable(&metric.name), metric.before));
    }
    if !report.tokens.is_empty() {
        let first = report.tokens.iter().take(TOKENS);
        let more = report.tokens.len().saturating_sub(TOKENS);
        let more = (more > 0).then(|| format!("and {more} more"));
        let tokens = first.map(|token| format!("{} {}", token.index, printable(&token.text))).chain(more);
        lines.push(format!("tokens ({}):", report.bos_in_words()));
        lines.extend(wrapped("  ", tokens));
    }
    if let Err(error) = report.check() {
        lines.push(error.to_string());
    } else if !report.values.is_empty() {
        lines.push(String::new());
        lines.extend(match report.axes.len() {
            _ if report.is_attention() && report.scale == Scale::Share => heads(report),
            1 => values(report),
            2 if !report.texts.is_empty() || report.is_bottom_up() => grid(report),
            2 => matrix(report).unwrap_or_else(|| strongest(report)),
            _ => strongest(report),
        });
    }
    if !report.notes.is_empty() {
        lines.push(String::new());
        lines.extend(report.notes.iter().flat_map(|note| {
            let words: Vec<String> = printable(note).split(' ').map(str::to_owned).collect();
            wrapped_by(" ", "  ", words)
        }));
    }
    lines.iter().map(|line| format!("{}\n", line.trim_end())).collect()
}

/// Lines for one axis: label, value and text.
fn values(report: &Report) -> Vec<String> {
    let labels: Vec<String> = report.axes[0].labels.iter().map(|label| shortened(label, LABEL)).collect();
    let width = widest(&labels);
    let mut places: Vec<usize> = (0..labels.len()).collect();
    let mut lines = Vec::new();
    if labels.len() > LINES {
        places = strongest_places(report, LINES);
        lines.push(format!("the {} strongest of {}:", places.len(), labels.len()));
    }
    lines.extend(places.into_iter().map(|place| {
        let label = &labels[place];
        let text = report
            .texts
            .get(place)
            .map_or(String::new(), |text| shortened(text, WIDTH.saturating_sub(width + 13).max(LABEL)));
        format!("{}{label}  {:>9}  {text}", padding(label, width), shown_value(report, place))
    }));
    lines
}

/// Two axes as rows and columns, if the width allows.
fn matrix(report: &Report) -> Option<Vec<String>> {
    let [rows, columns] = report.axes.as_slice() else { return None };
    let labels: Vec<String> = rows.labels.iter().map(|label| shortened(label, LABEL)).collect();
    let heads: Vec<String> = columns.labels.iter().map(|label| shortened(label, COLUMN_LABEL)).collect();
    let cells: Vec<String> = (0..report.values.len()).map(|place| shown_value(report, place)).collect();
    let first = widest(&labels);
    let width = widest(&heads).max(widest(&cells)) + 1;
    if first + width * heads.len() > WIDTH {
        return None;
    }
    let line = |label: &str, cells: &[String]| {
        let cells: String = cells.iter().map(|cell| format!("{}{cell}", padding(cell, width))).collect();
        format!("{}{label}{cells}", padding(label, first))
    };
    let mut lines = vec![format!("rows: {}, columns: {}", printable(&rows.name), printable(&columns.name))];
    lines.push(line("", &heads));
    lines
        .extend(labels.iter().zip(cells.chunks(heads.len().max(1))).map(|(label, cells)| line(label, cells)));
    Some(lines)
}

/// Grid of values and their texts, with the last layer first.
///
/// A grid that is too wide continues below.
fn grid(report: &Report) -> Vec<String> {
    let [rows, columns] = report.axes.as_slice() else { return Vec::new() };
    let mut order: Vec<usize> = (0..rows.labels.len()).collect();
    if report.is_bottom_up() {
        order.reverse();
    }
    let names: Vec<String> = rows.labels.iter().map(|label| shortened(label, LABEL)).collect();
    let cell = |row: usize, column: usize| {
        let place = row * columns.labels.len() + column;
        let value = shown_value(report, place);
        match report.texts.get(place) {
            Some(text) => format!("{} {value}", shortened(text, COLUMN_LABEL)),
            None => value,
        }
    };
    let first = widest(&names);
    let (rows, columns) = (printable(&rows.name), columns.labels.len());
    let mut lines = vec![format!("rows: {rows}, columns: {}", printable(&report.axes[1].name))];
    let (mut begin, mut blocks) = (0, 0);
    while begin < columns {
        // Columns of this block with their headings.
        let mut block: Vec<Vec<String>> = Vec::new();
        let mut width = first;
        for column in begin..columns {
            let heading = shortened(&report.axes[1].labels[column], COLUMN_LABEL);
            let cells: Vec<String> =
                std::iter::once(heading).chain(order.iter().map(|row| cell(*row, column))).collect();
            width += 2 + widest(&cells);
            if width > WIDTH && !block.is_empty() {
                break;
            }
            block.push(cells);
        }
        if blocks > 0 {
            lines.push(String::new());
        }
        let labels = std::iter::once("").chain(order.iter().map(|row| names[*row].as_str()));
        lines.extend(labels.enumerate().map(|(line, label)| {
            let cells = block
                .iter()
                .map(|cells| format!("  {}{}", cells[line], padding(&cells[line], widest(cells))));
            format!("{}{label}{}", padding(label, first), cells.collect::<String>())
        }));
        (begin, blocks) = (begin + block.len(), blocks + 1);
    }
    lines
}

/// Strongest cells with their labels.
fn strongest(report: &Report) -> Vec<String> {
    let places = strongest_places(report, CELLS);
    let axes: Vec<String> = report.axes.iter().map(|axis| printable(&axis.name)).collect();
    let present = report.values.iter().flatten().count();
    let heading = format!("the {} strongest of {present} values ({}):", places.len(), axes.join(", "));
    let lines = places.into_iter().map(|place| {
        let label = labels_of(report, place).join("  ");
        format!("{:>9}  {label}  {}", shown_value(report, place), text_at(report, place))
    });
    std::iter::once(heading).chain(lines).collect()
}

/// One line per head: mean attention to key 0, itself and the previous token; strongest pair.
fn heads(report: &Report) -> Vec<String> {
    let len = report.axes[2].labels.len();
    let queries = &report.axes[2].labels;
    let mut lines = vec![
        "mean attention of queries 1 and later; the strongest pair excludes key 0".into(),
        format!("{:>10}  {:>8}  {:>8}  {:>8}  strongest", "layer.head", "key 0", "itself", "previous"),
    ];
    for (place, head) in report.values.chunks(len * len).enumerate() {
        if head.iter().all(Option::is_none) {
            continue;
        }
        let share = |query: usize, key: usize| head[query * len + key].unwrap_or(0.0);
        let mean = |key: fn(usize) -> usize| {
            let sum: f32 = (1..len).map(|query| share(query, key(query))).sum();
            if len > 1 { format!("{:.3}", sum / (len - 1) as f32) } else { "-".into() }
        };
        let pairs = (1..len).flat_map(|query| (1..=query).map(move |key| (query, key)));
        let strongest =
            pairs.max_by(|a, b| share(a.0, a.1).total_cmp(&share(b.0, b.1))).map(|(query, key)| {
                let [query_label, key_label] = [query, key].map(|token| shortened(&queries[token], LABEL));
                format!("{query_label} -> {key_label}  {:.3}", share(query, key))
            });
        let heads = report.axes[1].labels.len();
        let name =
            format!("{}.{}", report.axes[0].labels[place / heads], report.axes[1].labels[place % heads]);
        let [first, itself, previous] = [mean(|_| 0), mean(|query| query), mean(|query| query - 1)];
        lines.push(format!(
            "{:>10}  {first:>8}  {itself:>8}  {previous:>8}  {}",
            printable(&name),
            strongest.unwrap_or_default()
        ));
    }
    lines
}

/// Indices of the values with the largest magnitudes, largest first.
fn strongest_places(report: &Report, count: usize) -> Vec<usize> {
    let magnitude = |place: &usize| report.at(*place).map_or(0.0, f32::abs);
    let mut places: Vec<usize> =
        (0..report.values.len()).filter(|place| report.at(*place).is_some()).collect();
    places.sort_by(|a, b| magnitude(b).total_cmp(&magnitude(a)));
    places.truncate(count);
    places
}

fn labels_of(report: &Report, mut place: usize) -> Vec<String> {
    let mut labels = Vec::new();
    for axis in report.axes.iter().rev() {
        labels.push(format!("{} {}", axis.name, axis.labels[place % axis.labels.len()]));
        place /= axis.labels.len();
    }
    labels.iter().rev().map(|label| shortened(label, 2 * LABEL)).collect()
}

fn shown_value(report: &Report, place: usize) -> String {
    report.at(place).map_or("-".into(), short)
}

fn text_at(report: &Report, place: usize) -> String {
    report.texts.get(place).map(|text| shortened(text, LABEL)).unwrap_or_default()
}

fn widest(texts: &[String]) -> usize {
    texts.iter().map(|text| text.chars().count()).max().unwrap_or(0)
}

/// Spaces that right-align text at `width`.
fn padding(text: &str, width: usize) -> String {
    " ".repeat(width.saturating_sub(text.chars().count()))
}

fn wrapped(indent: &str, pieces: impl IntoIterator<Item = String>) -> Vec<String> {
    wrapped_by("  ", indent, pieces)
}

/// Wraps pieces into lines of at most [`WIDTH`] characters; a longer piece gets its own line.
fn wrapped_by(between: &str, indent: &str, pieces: impl IntoIterator<Item = String>) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for piece in pieces {
        match lines.last_mut() {
            Some(line) if line.chars().count() + between.len() + piece.chars().count() <= WIDTH => {
                line.push_str(between);
                line.push_str(&piece);
            }
            _ => lines.push(format!("{indent}{piece}")),
        }
    }
    lines
}
