//! Results of an analysis, as numbers and as pictures for notebooks.

use std::fs;
use std::path::{Path, PathBuf};

use candle_gpt2_interpret::LensCell;
use candle_gpt2_look::{Analysis, Details, LensDetails};
use candle_gpt2_pictures::{Axis, Report, Scale, Token, Width, table};
use numpy::{IntoPyArray, PyArray1, PyArrayDyn, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::exceptions::PyImportError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use serde_json::Value;

use crate::errors::{Result, gpt2_error, type_error, value_error};
use crate::values::{Values, float_array, number, to_python};

/// Height in pixels of a picture's frame in a notebook, until its page is rendered.
const FRAME_HEIGHT: usize = 560;
/// Scale factor for PNGs: from a picture's 96 pixels per inch to 384.
const PIXEL_SCALE: f64 = 4.0;

/// Picture of values over named axes, for display in notebooks.
///
/// It is the result of an analysis, or shows your own values.
///
///     >>> Picture("scores", np.zeros((2, 3)), {"layer": [0, 1], "head": range(3)})
///     >>> Picture.colored_tokens(["One", " day"], [0.5, 2.0])
///
/// title: one line above the picture.
///
/// values: an array with one dimension per axis; NaN is drawn gray. One axis is drawn as bars, two as a
/// heatmap. With more axes the last two are the heatmap's rows and columns.
///
/// axes: a dict from the name of each axis, in the order of the dimensions, to its labels, one per value
/// along the axis.
///
/// texts: a text for each value, in the order of the values, shown in its cell.
///
/// scale: how values map to colors. "signed": red above 0, blue below. "share": from 0 to 1. "amount": from 0
/// to the largest value.
///
/// A picture has title, tokens, axes, values, texts and details (further results of the analysis). str()
/// formats it as a table; save() writes .html, .svg, .png or .pdf.
#[pyclass(frozen, generic, module = "candle_gpt2")]
pub(crate) struct Picture {
    analysis: Analysis,
    details: Py<PyDict>,
}

impl Picture {
    fn from_report(py: Python<'_>, report: Report) -> Result<Self> {
        let details = Details::Json(Value::Null);
        Self::new(py, Analysis { report, details, graph: None, features: Vec::new() })
    }

    pub(crate) fn new(py: Python<'_>, analysis: Analysis) -> Result<Self> {
        let details = PyDict::new(py);
        match &analysis.details {
            Details::Lens(lens) => cells(py, lens, &details)?,
            Details::Json(Value::Object(entries)) => {
                for (name, value) in entries {
                    match numbers(value) {
                        Some(numbers) => details.set_item(name, PyArray1::from_vec(py, numbers))?,
                        None => details.set_item(name, to_python(py, value)?)?,
                    }
                }
            }
            Details::Json(_) => (),
        }
        if !analysis.features.is_empty() {
            let features =
                serde_json::to_value(&analysis.features).map_err(|error| gpt2_error(error.to_string()))?;
            details.set_item("features", to_python(py, &features)?)?;
        }
        Ok(Self { analysis, details: details.unbind() })
    }
}

impl Picture {
    /// Converts the SVG to an image with CairoSVG.
    fn convert(&self, py: Python<'_>, path: &Path, kind: &str) -> Result<()> {
        let missing = |error: PyErr| match error.is_instance_of::<PyImportError>(py) {
            true => PyImportError::new_err(format!(
                "{}: .{kind} needs CairoSVG; run `pip install cairosvg`, or save an .svg",
                path.display()
            )),
            false => error,
        };
        let library = py.import("cairosvg").map_err(missing)?;
        let options = PyDict::new(py);
        options.set_item("bytestring", self.svg(2)?.as_bytes())?;
        options.set_item("write_to", path.to_string_lossy())?;
        if kind == "png" {
            options.set_item("scale", PIXEL_SCALE)?;
        }
        library.getattr(format!("svg2{kind}"))?.call((), Some(&options))?;
        Ok(())
    }
}

/// Returns the numbers in a non-empty JSON array, or `None` for any other value.
#[expect(clippy::cast_possible_truncation, reason = "the values are f32")]
fn numbers(value: &Value) -> Option<Vec<f32>> {
    let list = value.as_array().filter(|list| !list.is_empty())?;
    list.iter().map(|number| Some(number.as_f64()? as f32)).collect()
}

/// Stores a lens's cells as arrays over layers and tokens.
fn cells(py: Python<'_>, lens: &LensDetails, details: &Bound<'_, PyDict>) -> PyResult<()> {
    let cells = || lens.layers.iter().flat_map(|layer| &layer.cells);
    let first = lens.layers.first().and_then(|layer| layer.cells.first());
    let shape = [lens.layers.len(), lens.layers.first().map_or(0, |layer| layer.cells.len())];
    let numbers =
        |of: &dyn Fn(&LensCell) -> f32| PyArray1::from_vec(py, cells().map(of).collect()).reshape(shape);
    details.set_item("entropy", numbers(&|cell| cell.entropy)?)?;
    details.set_item("divergence", numbers(&|cell| cell.divergence)?)?;
    details.set_item("next_logprob", numbers(&|cell| cell.next.unwrap_or(f32::NAN))?)?;
    let best = || cells().flat_map(|cell| &cell.top);
    let top_shape = [shape[0], shape[1], first.map_or(0, |cell| cell.top.len())];
    let ids: Vec<u32> = best().map(|(id, _)| *id).collect();
    details.set_item("top_ids", ids.into_pyarray(py).reshape(top_shape)?)?;
    let logprobs: Vec<f32> = best().map(|(_, logprob)| *logprob).collect();
    details.set_item("top_logprobs", logprobs.into_pyarray(py).reshape(top_shape)?)?;
    if !lens.watch.is_empty() {
        let watched = || cells().flat_map(|cell| &cell.watched);
        let watched_shape = [shape[0], shape[1], lens.watch.len()];
        let ranks: Vec<u64> = watched().map(|(rank, _)| *rank as u64).collect();
        details.set_item("watched_rank", ranks.into_pyarray(py).reshape(watched_shape)?)?;
        let logprobs: Vec<f32> = watched().map(|(_, logprob)| *logprob).collect();
        details.set_item("watched_logprob", logprobs.into_pyarray(py).reshape(watched_shape)?)?;
    }
    Ok(())
}

fn parse_scale(name: &str) -> Result<Scale> {
    match name {
        "signed" => Ok(Scale::Signed),
        "share" => Ok(Scale::Share),
        "amount" => Ok(Scale::Amount),
        _ => Err(value_error(format!("scale: expected \"signed\", \"share\" or \"amount\", found {name:?}"))),
    }
}

/// Reads the axes with their labels as text, one label for each value along an axis.
fn parse_axes(given: &Bound<'_, PyDict>, shape: &[usize]) -> Result<Vec<Axis>> {
    let axis = |(name, labels): (Bound<'_, PyAny>, Bound<'_, PyAny>)| {
        let labels = labels.try_iter()?.map(|label| Ok(label?.str()?.to_string()));
        Ok(Axis::new(name.str()?.to_string(), labels.collect::<PyResult<Vec<_>>>()?))
    };
    let axes = given.iter().map(axis).collect::<PyResult<Vec<_>>>()?;
    let expected: Vec<usize> = axes.iter().map(|axis| axis.labels.len()).collect();
    if axes.is_empty() || expected != shape {
        let names: Vec<&str> = axes.iter().map(|axis| axis.name.as_str()).collect();
        return Err(value_error(format!(
            "values: expected shape {expected:?} from the labels of the axes ({}), found shape {shape:?}",
            names.join(", ")
        )));
    }
    Ok(axes)
}

#[pymethods]
impl Picture {
    /// Creates a picture of a text whose tokens are colored by value, as in CircuitsVis.
    ///
    /// tokens: the tokens' texts, such as those of `to_str_tokens`. values: one number per token. scale: see
    /// Picture.
    #[staticmethod]
    #[pyo3(signature = (tokens, values, title = "", *, scale = "signed"))]
    fn colored_tokens(
        py: Python<'_>,
        tokens: Vec<String>,
        values: &Bound<'_, PyAny>,
        title: &str,
        scale: &str,
    ) -> Result<Self> {
        let values = float_array(values)?;
        if values.shape() != [tokens.len()] {
            let (expected, found) = (tokens.len(), values.shape());
            return Err(value_error(format!(
                "values: expected one value for each of the {expected} tokens, found shape {found:?}"
            )));
        }
        let values = values.to_vec().map_err(PyErr::from)?;
        Self::from_report(py, Report::of_tokens(title.into(), &tokens, &values, parse_scale(scale)?))
    }

    #[new]
    #[pyo3(signature = (title, values, axes, *, texts = None, scale = "signed"))]
    fn from_values(
        py: Python<'_>,
        title: String,
        values: &Bound<'_, PyAny>,
        axes: &Bound<'_, PyDict>,
        texts: Option<Vec<String>>,
        scale: &str,
    ) -> Result<Self> {
        let values = float_array(values)?;
        let mut report = Report::new("values", title, String::new(), Vec::new(), false);
        report.axes = parse_axes(axes, values.shape())?;
        // Non-finite values are drawn as empty cells.
        let finite = |value: f32| value.is_finite().then_some(value);
        report.values = values.to_vec().map_err(PyErr::from)?.into_iter().map(finite).collect();
        report.texts = texts.unwrap_or_default();
        report.scale = parse_scale(scale)?;
        report.check()?;
        Self::from_report(py, report)
    }

    fn __repr__(&self) -> String {
        let axes: Vec<String> = self
            .analysis
            .report
            .axes
            .iter()
            .map(|axis| format!("{} {}", axis.name, axis.labels.len()))
            .collect();
        format!("Picture({:?}, {})", self.analysis.report.title, axes.join(" × "))
    }

    fn __str__(&self) -> String {
        table(&self.analysis.report)
    }

    /// Title on a single line.
    #[getter]
    fn title(&self) -> &str {
        &self.analysis.report.title
    }

    /// Tokens of the text, with spaces as · and newlines as ↵.
    #[getter]
    fn tokens(&self) -> Vec<&str> {
        self.analysis.report.tokens.iter().map(|token: &Token| token.text.as_str()).collect()
    }

    /// Dict from each axis name to its labels.
    #[getter]
    fn axes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let axes = PyDict::new(py);
        self.analysis.report.axes.iter().try_for_each(|axis| axes.set_item(&axis.name, &axis.labels))?;
        Ok(axes)
    }

    /// Values over the axes; NaN where a value is missing.
    #[getter]
    fn values<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArrayDyn<f32>>> {
        let numbers = self.analysis.report.values.iter().map(|value| value.unwrap_or(f32::NAN)).collect();
        let shape = self.analysis.report.axes.iter().map(|axis| axis.labels.len()).collect();
        Values { numbers, shape }.into_array(py)
    }

    /// Texts shown for the values, in order; an empty list if there are none.
    #[getter]
    fn texts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, &self.analysis.report.texts)
    }

    /// Further results of the analysis as a dict.
    #[getter]
    fn details<'py>(&self, py: Python<'py>) -> Bound<'py, PyDict> {
        self.details.bind(py).clone()
    }

    /// Returns the report as a dict with the keys of the program's `--json`.
    fn to_dict<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyAny>> {
        // Convert by way of JSON text, so that numbers have the digits that the program prints.
        let json = serde_json::to_string(&self.analysis).and_then(|text| serde_json::from_str(&text));
        Ok(to_python(py, &json.map_err(|error| gpt2_error(error.to_string()))?)?)
    }

    /// Returns the picture as a single HTML page.
    fn html(&self) -> String {
        self.analysis.page()
    }

    /// Returns the picture as an SVG for a paper.
    ///
    /// columns: width in page columns, 1 or 2.
    #[pyo3(signature = (columns = 2))]
    fn svg(&self, #[pyo3(from_py_with = number)] columns: usize) -> Result<String> {
        let width = match columns {
            1 => Width::OneColumn,
            2 => Width::TwoColumns,
            _ => return Err(value_error(format!("columns: expected 1 or 2, found {columns}"))),
        };
        Ok(self.analysis.svg(width)?)
    }

    /// Writes a web page (.html), a figure for a paper (.svg, .pdf) or an image (.png).
    ///
    /// .png and .pdf need CairoSVG: `pip install cairosvg`.
    #[allow(clippy::needless_pass_by_value, reason = "PyO3 passes a path by value")]
    fn save(&self, py: Python<'_>, path: PathBuf) -> Result<()> {
        let text = match path.extension().and_then(|extension| extension.to_str()) {
            Some("html" | "htm") => self.html(),
            Some("svg") => self.svg(2)?,
            Some(kind @ ("png" | "pdf")) => return self.convert(py, &path, kind),
            _ => {
                return Err(value_error(format!(
                    "{}: expected a name that ends in .html, .svg, .png or .pdf",
                    path.display()
                )));
            }
        };
        Ok(fs::write(&path, text).map_err(PyErr::from)?)
    }

    /// Returns the page in a frame that fits its content.
    ///
    /// The frame isolates the page's style and script from the rest of the notebook.
    fn _repr_html_(&self) -> String {
        let page = self.analysis.page().replace('&', "&amp;").replace('"', "&quot;");
        format!(
            "<iframe data-fit srcdoc=\"{page}\" style=\"width: 100%; height: {FRAME_HEIGHT}px; border: 0\" loading=\"lazy\"></iframe>"
        )
    }

    fn __reduce__(&self) -> Result<()> {
        Err(type_error("a picture cannot be pickled; pickle its `to_dict()`, or save it to a file"))
    }
}
