//! `gpt2 eval --list`: every protocol, where its arithmetic comes from, its data, and what others measured by it.

use anyhow::Result;
use gpt2_evaluation::{Dataset, Kl, Protocol, Published, protocols};
use serde_json::{Value, json};

use crate::output;

/// Prints all protocols, as JSON one a line.
pub(super) fn print(is_json: bool) -> Result<()> {
    if is_json {
        protocols()
            .iter()
            .map(|protocol| as_json(protocol))
            .try_for_each(|line| output::write_json(&line))?;
        return output::write_json(&json!({
            "protocol": Kl::NAME, "about": Kl::ABOUT, "source": Kl::SOURCE, "parameter": null, "dataset": null, "published": [],
        }));
    }
    protocols().iter().try_for_each(|protocol| print_protocol(protocol))?;
    print_lines(Kl::NAME, Kl::ABOUT, &[format!("source: {}", Kl::SOURCE), "data: any text".to_owned()])
}

fn as_json(protocol: &Protocol) -> Value {
    let Protocol { name, about, source, dataset, published, parameter, .. } = protocol;
    let Dataset { name: data, hub, sha256, licence } = dataset;
    json!({
        "protocol": name,
        "about": about,
        "source": source,
        "parameter": parameter.map(|parameter| json!({ "default": parameter.default, "about": parameter.about })),
        "dataset": { "name": data, "hub": hub, "sha256": sha256, "licence": licence },
        "published": published,
    })
}

fn print_protocol(protocol: &Protocol) -> Result<()> {
    let Dataset { name, hub, licence, .. } = protocol.dataset;
    let data = match hub {
        Some(hub) => format!("data: {name}, {hub}, {licence}"),
        None => format!("data: {name}"),
    };
    let number = protocol.parameter.map(|parameter| match parameter.default {
        Some(default) => format!("number: {} [default: {default}]", parameter.about),
        None => format!("number: {}", parameter.about),
    });
    let published = protocol.published.iter().map(|published| {
        let Published { model, metric, value, source, protocol, exact } = published;
        let other = if *exact { String::new() } else { format!("; protocol {protocol}") };
        format!("published: {metric} {value} of {} ({source}{other})", model.name())
    });
    let source = format!("source: {}", protocol.source);
    let lines: Vec<String> = number.into_iter().chain([source, data]).chain(published).collect();
    print_lines(protocol.name, protocol.about, &lines)
}

fn print_lines(name: &str, about: &str, lines: &[String]) -> Result<()> {
    output::write_line(&format!("{name}: {about}"))?;
    lines.iter().try_for_each(|line| output::write_line(&format!("    {line}")))
}
