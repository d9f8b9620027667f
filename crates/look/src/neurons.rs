//! Positions in a text at which a neuron is most active.

use std::ops::Range;

use candle_core::DType;
use candle_gpt2::{Site, SiteKind};
use candle_gpt2_engine::{Reporter, Unit};
use candle_gpt2_pictures::Axis;
use serde::Deserialize;
use serde_json::json;

use crate::error::{Result, invalid_option};
use crate::{Analysis, Look, LookSubject, Neuron, Reader, Text};

/// Number of tokens shown on each side of a position.
const CONTEXT: usize = 8;

/// Positions in a text at which a neuron is most active.
///
/// The activation is the output of the activation function (`mlp_post`). A text of any length is read in
/// windows of the context size.
///
/// ```
/// use candle_gpt2_engine::Silent;
/// use candle_gpt2_look::{Look, Neuron, Neurons, Reader, LookSubject, Text};
///
/// # let model = candle_gpt2_engine::ModelOptions::default().open(&Silent)?.load(&Silent)?;
/// # let reader = Reader::without_bos(model.vocabulary());
/// # let subject = LookSubject::new(&model, "built-in".into(), &reader);
/// let neuron: Neuron = "3.611".parse()?;
/// let text = Text::Words("Good night, good night! Parting is such sweet sorrow".into());
/// let found = Neurons { text, neuron, top: 3 }.at(&subject, &Silent)?;
/// assert_eq!((neuron.layer, neuron.neuron, found.report.values.len()), (3, 611, 3));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct Neurons {
    /// Text to analyze.
    #[cfg_attr(feature = "clap", arg(skip))]
    pub text: Text,
    /// The neuron: LAYER.NEURON
    #[cfg_attr(feature = "clap", arg(long, value_name = "NEURON"))]
    pub neuron: Neuron,
    /// Number of positions to show
    #[serde(default = "usual_top")]
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = usual_top()))]
    pub top: usize,
}

fn usual_top() -> usize {
    20
}

impl Look for Neurons {
    /// Tokens of the text.
    type Checked = Vec<u32>;

    fn check(&self, reader: &Reader) -> Result<Vec<u32>> {
        let Neuron { layer, neuron } = self.neuron;
        let config = reader.config();
        if layer >= config.n_layer || neuron >= config.inner_width() {
            return Err(invalid_option(format!(
                "`neuron` {layer}.{neuron}: this model has {} layers of {} neurons, counted from 0",
                config.n_layer,
                config.inner_width()
            )));
        }
        let ids = reader.tokens(&self.text)?;
        match ids.is_empty() {
            true => Err(invalid_option("the text is empty")),
            false => Ok(ids),
        }
    }

    fn look(&self, ids: Vec<u32>, subject: &LookSubject, reporter: &dyn Reporter) -> Result<Analysis> {
        let Neuron { layer, neuron } = self.neuron;
        let bos = subject.reader().bos();
        let n_positions = subject.config().n_positions;
        let window = n_positions.saturating_sub(usize::from(bos.is_some()));
        let site = Site::in_block(layer, SiteKind::MlpPost);
        let bar = reporter.start("reading", ids.len() as u64, Unit::Items("tokens"));
        let mut values: Vec<f32> = Vec::with_capacity(ids.len());
        for part in ids.chunks(window.max(1)) {
            let read: Vec<u32> = bos.into_iter().chain(part.iter().copied()).collect();
            let post = subject.run(&read)?.record([site])?.get(site)?.squeeze(0)?.narrow(1, neuron, 1)?;
            let post: Vec<f32> = post.squeeze(1)?.to_dtype(DType::F32)?.to_vec1()?;
            values.extend(&post[read.len() - part.len()..]);
            bar.advance(part.len() as u64);
        }
        drop(bar);
        let mut order: Vec<usize> = (0..values.len()).collect();
        order.sort_by(|a, b| values[*b].total_cmp(&values[*a]).then(a.cmp(b)));
        order.truncate(self.top.max(1));
        let around = |place: usize| -> (String, String) {
            let text = |range: Range<usize>| ids[range].iter().map(|id| subject.printable(*id)).collect();
            let end = (place + 1 + CONTEXT).min(ids.len());
            (text(place.saturating_sub(CONTEXT)..place), text(place + 1..end))
        };
        // Positions include the BOS token, as in every analysis.
        let index = |place: usize| place + usize::from(bos.is_some());
        let label = |place: &usize| {
            let (before, after) = around(*place);
            format!("{}: {before}[{}]{after}", index(*place), subject.printable(ids[*place]))
        };
        let whole: Vec<u32> = bos.into_iter().chain(ids.iter().copied()).collect();
        // The tokens of a long text would dominate the report.
        let listed = if whole.len() <= n_positions { &whole[..] } else { &[] };
        let mut report =
            subject.report("neurons", format!("where neuron {layer}.{neuron} is most active"), listed);
        report.axes = vec![Axis::new("place", order.iter().map(label))];
        report.values = order.iter().map(|place| Some(values[*place])).collect();
        let active = values.iter().filter(|value| **value > 0.0).count();
        report.notes.push(format!(
            "{} tokens read, each window {}; the activation is above 0 at {active} of them",
            values.len(),
            subject.in_front()
        ));
        let places: Vec<_> = order
            .iter()
            .map(|place| {
                let (before, after) = around(*place);
                json!({
                    "index": index(*place), "id": ids[*place], "text": subject.printable(ids[*place]), "before": before, "after": after,
                    "value": values[*place],
                })
            })
            .collect();
        Ok(Analysis::new(report, json!({ "places": places })))
    }
}
