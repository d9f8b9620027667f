//! The result of an analysis, as numbers and as a picture that a notebook displays.

use std::fs;
use std::path::{Path, PathBuf};

use candle_gpt2_interpret::LensCell;
use candle_gpt2_look::{Details, Found, LensDetails};
use candle_gpt2_pictures::{Axis, Report, Scale, Token, Width, table};
use numpy::{IntoPyArray, PyArray1, PyArrayDyn, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::exceptions::PyImportError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use serde_json::Value;

use crate::errors::{Result, failed, wrong_type, wrong_value};
use crate::values::{Values, float_array, number, python_of};

/// Height of a picture's frame in a notebook until its page is drawn, in pixels.
const FRAME_HEIGHT: usize = 560;
/// Pixels of a PNG for each of the 96 an inch of the picture has: 384 an inch.
const PIXEL_SCALE: f64 = 4.0;

/// A picture of values over named axes: the result of an analysis, or of your own values. Notebooks display it.
///
///     >>> Picture("scores", np.zeros((2, 3)), {"layer": [0, 1], "head": range(3)})
///     >>> Picture.colored_tokens(["One", " day"], [0.5, 2.0])
///
/// title: one line above the picture.
///
/// values: an array with a dimension for each axis; nan is drawn gray. One axis becomes bars, two a heatmap, and of more axes the last
/// two are the heatmap's rows and columns.
///
/// axes: a dict of the name of each axis, in the order of the dimensions, and its labels, one for each value along it.
///
/// texts: a text for each value, in the order of the values, which is shown in its cell.
///
/// scale: how values become colors. "signed": red above 0, blue below. "share": from 0 to 1. "amount": from 0 to the largest value.
///
/// A picture has title, tokens, axes, values, texts and details (further results of the analysis); str() is a table; save() writes .html,
/// .svg, .png or .pdf.
#[pyclass(frozen, generic, module = "candle_gpt2")]
pub(crate) struct Picture {
    found: Found,
    details: Py<PyDict>,
}

impl Picture {
    fn of_report(py: Python<'_>, report: Report) -> Result<Self> {
        let details = Details::Json(Value::Null);
        Self::new(py, Found { report, details, graph: None, features: Vec::new() })
    }

    pub(crate) fn new(py: Python<'_>, found: Found) -> Result<Self> {
        let details = PyDict::new(py);
        match &found.details {
            Details::Lens(lens) => cells(py, lens, &details)?,
            Details::Json(Value::Object(entries)) => {
                for (name, value) in entries {
                    match numbers(value) {
                        Some(numbers) => details.set_item(name, PyArray1::from_vec(py, numbers))?,
                        None => details.set_item(name, python_of(py, value)?)?,
                    }
                }
            }
            Details::Json(_) => (),
        }
        if !found.features.is_empty() {
            let features =
                serde_json::to_value(&found.features).map_err(|error| failed(error.to_string()))?;
            details.set_item("features", python_of(py, &features)?)?;
        }
        Ok(Self { found, details: details.unbind() })
    }
}

impl Picture {
    /// Writes the SVG as an image by CairoSVG.
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

/// A list of numbers.
#[expect(clippy::cast_possible_truncation, reason = "they are of f32")]
fn numbers(value: &Value) -> Option<Vec<f32>> {
    let list = value.as_array().filter(|list| !list.is_empty())?;
    list.iter().map(|number| Some(number.as_f64()? as f32)).collect()
}

/// The cells of a lens as arrays over layers and tokens.
fn cells(py: Python<'_>, lens: &LensDetails, details: &Bound<'_, PyDict>) -> PyResult<()> {
    let cells = || lens.layers.iter().flat_map(|layer| &layer.cells);
    let first = lens.layers.first().and_then(|layer| layer.cells.first());
    let places = [lens.layers.len(), lens.layers.first().map_or(0, |layer| layer.cells.len())];
    let numbers =
        |of: &dyn Fn(&LensCell) -> f32| PyArray1::from_vec(py, cells().map(of).collect()).reshape(places);
    details.set_item("entropy", numbers(&|cell| cell.entropy)?)?;
    details.set_item("divergence", numbers(&|cell| cell.divergence)?)?;
    details.set_item("next_logprob", numbers(&|cell| cell.next.unwrap_or(f32::NAN))?)?;
    let best = || cells().flat_map(|cell| &cell.top);
    let of_top = [places[0], places[1], first.map_or(0, |cell| cell.top.len())];
    let ids: Vec<u32> = best().map(|(id, _)| *id).collect();
    details.set_item("top_ids", ids.into_pyarray(py).reshape(of_top)?)?;
    let logprobs: Vec<f32> = best().map(|(_, logprob)| *logprob).collect();
    details.set_item("top_logprobs", logprobs.into_pyarray(py).reshape(of_top)?)?;
    if !lens.watch.is_empty() {
        let watched = || cells().flat_map(|cell| &cell.watched);
        let of_watched = [places[0], places[1], lens.watch.len()];
        let ranks: Vec<u64> = watched().map(|(rank, _)| *rank as u64).collect();
        details.set_item("watched_rank", ranks.into_pyarray(py).reshape(of_watched)?)?;
        let logprobs: Vec<f32> = watched().map(|(_, logprob)| *logprob).collect();
        details.set_item("watched_logprob", logprobs.into_pyarray(py).reshape(of_watched)?)?;
    }
    Ok(())
}

fn scale_of(name: &str) -> Result<Scale> {
    match name {
        "signed" => Ok(Scale::Signed),
        "share" => Ok(Scale::Share),
        "amount" => Ok(Scale::Amount),
        _ => Err(wrong_value(format!("scale: expected \"signed\", \"share\" or \"amount\", found {name:?}"))),
    }
}

/// The labels of each axis, as text: one for each value along it.
fn axes_of(given: &Bound<'_, PyDict>, shape: &[usize]) -> Result<Vec<Axis>> {
    let axis = |(name, labels): (Bound<'_, PyAny>, Bound<'_, PyAny>)| {
        let labels = labels.try_iter()?.map(|label| Ok(label?.str()?.to_string()));
        Ok(Axis::new(name.str()?.to_string(), labels.collect::<PyResult<Vec<_>>>()?))
    };
    let axes = given.iter().map(axis).collect::<PyResult<Vec<_>>>()?;
    let expected: Vec<usize> = axes.iter().map(|axis| axis.labels.len()).collect();
    if axes.is_empty() || expected != shape {
        let names: Vec<&str> = axes.iter().map(|axis| axis.name.as_str()).collect();
        return Err(wrong_value(format!(
            "values: expected shape {expected:?}, the labels of the axes ({}), found {shape:?}",
            names.join(", ")
        )));
    }
    Ok(axes)
}

#[pymethods]
impl Picture {
    /// A text whose tokens are colored by a value each, as CircuitsVis shows it.
    ///
    /// tokens: the texts of the tokens, such as those of `to_str_tokens`. values: a number for each. scale: as of a Picture.
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
            return Err(wrong_value(format!(
                "values: expected one for each of the {expected} tokens, found shape {found:?}"
            )));
        }
        let values = values.to_vec().map_err(PyErr::from)?;
        Self::of_report(py, Report::of_tokens(title.into(), &tokens, &values, scale_of(scale)?))
    }

    #[new]
    #[pyo3(signature = (title, values, axes, *, texts = None, scale = "signed"))]
    fn of_values(
        py: Python<'_>,
        title: String,
        values: &Bound<'_, PyAny>,
        axes: &Bound<'_, PyDict>,
        texts: Option<Vec<String>>,
        scale: &str,
    ) -> Result<Self> {
        let values = float_array(values)?;
        let mut report = Report::new("values", title, String::new(), Vec::new(), false);
        report.axes = axes_of(axes, values.shape())?;
        // What is not finite is drawn as a cell without a value.
        let drawn = |value: f32| value.is_finite().then_some(value);
        report.values = values.to_vec().map_err(PyErr::from)?.into_iter().map(drawn).collect();
        report.texts = texts.unwrap_or_default();
        report.scale = scale_of(scale)?;
        report.check()?;
        Self::of_report(py, report)
    }

    fn __repr__(&self) -> String {
        let axes: Vec<String> = self
            .found
            .report
            .axes
            .iter()
            .map(|axis| format!("{} {}", axis.name, axis.labels.len()))
            .collect();
        format!("Picture({:?}, {})", self.found.report.title, axes.join(" × "))
    }

    fn __str__(&self) -> String {
        table(&self.found.report)
    }

    /// The title, in one line.
    #[getter]
    fn title(&self) -> &str {
        &self.found.report.title
    }

    /// The tokens of the text, with a space as · and a newline as ↵.
    #[getter]
    fn tokens(&self) -> Vec<&str> {
        self.found.report.tokens.iter().map(|token: &Token| token.text.as_str()).collect()
    }

    /// The labels of each axis of the values, by its name.
    #[getter]
    fn axes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let axes = PyDict::new(py);
        self.found.report.axes.iter().try_for_each(|axis| axes.set_item(&axis.name, &axis.labels))?;
        Ok(axes)
    }

    /// The values over the axes; nan if there is none.
    #[getter]
    fn values<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArrayDyn<f32>>> {
        let numbers = self.found.report.values.iter().map(|value| value.unwrap_or(f32::NAN)).collect();
        let shape = self.found.report.axes.iter().map(|axis| axis.labels.len()).collect();
        Values { numbers, shape }.into_array(py)
    }

    /// A text for each value, in the order of the values, if there are texts.
    #[getter]
    fn texts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, &self.found.report.texts)
    }

    /// Further results of the analysis: a dict.
    #[getter]
    fn details<'py>(&self, py: Python<'py>) -> Bound<'py, PyDict> {
        self.details.bind(py).clone()
    }

    /// The report, with the keys of the program's `--json`.
    fn to_dict<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyAny>> {
        // By way of text, in which numbers have the digits that the program prints.
        let json = serde_json::to_string(&self.found).and_then(|text| serde_json::from_str(&text));
        Ok(python_of(py, &json.map_err(|error| failed(error.to_string()))?)?)
    }

    /// One HTML file.
    fn html(&self) -> String {
        self.found.page()
    }

    /// A picture for a paper, one column wide or two.
    #[pyo3(signature = (columns = 2))]
    fn svg(&self, #[pyo3(from_py_with = number)] columns: usize) -> Result<String> {
        let width = match columns {
            1 => Width::OneColumn,
            2 => Width::TwoColumns,
            _ => return Err(wrong_value(format!("columns: expected 1 or 2, found {columns}"))),
        };
        Ok(self.found.svg(width)?)
    }

    /// Writes a file: a page (.html), a picture for a paper (.svg, .pdf) or an image (.png).
    ///
    /// .png and .pdf need CairoSVG: `pip install cairosvg`.
    #[allow(clippy::needless_pass_by_value, reason = "a path comes by value from Python")]
    fn save(&self, py: Python<'_>, path: PathBuf) -> Result<()> {
        let text = match path.extension().and_then(|extension| extension.to_str()) {
            Some("html" | "htm") => self.html(),
            Some("svg") => self.svg(2)?,
            Some(kind @ ("png" | "pdf")) => return self.convert(py, &path, kind),
            _ => {
                return Err(wrong_value(format!(
                    "{}: expected a name that ends in .html, .svg, .png or .pdf",
                    path.display()
                )));
            }
        };
        Ok(fs::write(&path, text).map_err(PyErr::from)?)
    }

    /// The page in a frame as high as its content, whose style and script touch nothing else of the notebook.
    fn _repr_html_(&self) -> String {
        let page = self.found.page().replace('&', "&amp;").replace('"', "&quot;");
        format!(
            "<iframe data-fit srcdoc=\"{page}\" style=\"width: 100%; height: {FRAME_HEIGHT}px; border: 0\" loading=\"lazy\"></iframe>"
        )
    }

    fn __reduce__(&self) -> Result<()> {
        Err(wrong_type("a picture cannot be pickled; pickle its `to_dict()`, or save it to a file"))
    }
}
