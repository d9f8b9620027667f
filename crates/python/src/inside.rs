//! A run whose intermediates are seen, under TransformerLens' names.

use gpt2::{LogitsFor, Site};
use gpt2_engine::LoadedModel;
use gpt2_interpret::{Chain, Head, Patterns, Record, Run};
use pyo3::prelude::*;

use crate::errors::{Failure, Result, wrong_value};
use crate::hooks::{Hooks, Raised};
use crate::process::computing;
use crate::values::Values;

/// What a run gave: the logits of every token, `(1, T, V)`, and what was seen, in the order of computation.
pub(crate) struct Seen {
    pub(crate) logits: Values,
    pub(crate) values: Vec<(String, Values)>,
}

/// Runs a model over tokens, and keeps what is at these places after the hooks.
pub(crate) fn run(
    py: Python<'_>,
    loaded: &LoadedModel,
    ids: &[u32],
    sites: Vec<Site>,
    mut hooks: Hooks,
    raised: &Raised,
) -> Result<Seen> {
    let seen = computing(py, loaded, || {
        let mut record = Record::new(sites.iter().copied());
        let run = Run::new(loaded.model(), ids)?;
        let logits = run.logits(LogitsFor::EveryToken, &mut Chain(vec![&mut hooks, &mut record]))?;
        let mut values = Vec::with_capacity(sites.len());
        for site in sites {
            // Given up one by one, so that nothing is held twice for long.
            let value = record.values.remove(&site);
            let value = value.ok_or_else(|| candle_core::Error::Msg(format!("{site} was not recorded")))?;
            values.push((site.to_string(), Values::of(&value)?));
        }
        Ok::<_, Failure>(Seen { logits: Values::of(&logits)?, values })
    });
    raised.or(seen)
}

/// Names of places as a text with commas or a list; all of them where there are none.
pub(crate) fn sites(names: Option<&Bound<'_, PyAny>>, n_layer: usize) -> Result<Vec<Site>> {
    let list = match names {
        None => "*".to_owned(),
        Some(names) => match names.extract::<String>() {
            Ok(list) => list,
            Err(_) => names.extract::<Vec<String>>()?.join(","),
        },
    };
    Ok(Site::matching(&list, n_layer)?)
}

/// Heads as pairs of layer and head, or as texts such as `"9.6"`; those of some layers, or all.
pub(crate) fn heads(
    loaded: &LoadedModel,
    layers: Option<Vec<usize>>,
    heads: Option<&Bound<'_, PyAny>>,
) -> Result<Vec<Head>> {
    let (n_layer, n_head) = (loaded.config().n_layer, loaded.config().n_head);
    let Some(heads) = heads else {
        let layers = layers.unwrap_or_else(|| (0..n_layer).collect());
        let all = layers.into_iter().flat_map(|layer| (0..n_head).map(move |head| Head { layer, head }));
        return all.map(|head| head.check(n_layer, n_head).map(|()| head).map_err(Failure::from)).collect();
    };
    if layers.is_some() {
        return Err(wrong_value("layers and heads cannot be used together; give one of them"));
    }
    let mut found = Vec::new();
    for item in heads.try_iter()? {
        let item = item?;
        let pair = match item.extract::<String>() {
            Ok(text) => {
                text.split_once('.').and_then(|(layer, head)| Some((layer.parse().ok()?, head.parse().ok()?)))
            }
            Err(_) => item.extract::<(usize, usize)>().ok(),
        };
        let (layer, head) = pair.ok_or_else(|| {
            wrong_value(format!(
                "heads: expected pairs of layer and head, or texts such as \"9.6\", found {item}"
            ))
        })?;
        let head = Head { layer, head };
        head.check(n_layer, n_head)?;
        if !found.contains(&head) {
            found.push(head);
        }
    }
    Ok(found)
}

/// The attention patterns of heads.
pub(crate) fn patterns(
    py: Python<'_>,
    loaded: &LoadedModel,
    ids: &[u32],
    heads: &[Head],
) -> Result<Patterns> {
    computing(py, loaded, || {
        let record = Run::new(loaded.model(), ids)?.record(Patterns::sites(heads))?;
        Ok(Patterns::of(record, heads)?)
    })
}
