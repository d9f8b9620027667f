//! Heads and cross-attention compared with transformers: logits, and gradients of all parameters.
//!
//! `scripts/reference/gradients.py` writes the fixtures. The sizes of all cases differ.

use std::collections::HashMap;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_gpt2::{
    ByOutput, Gpt2Cache, Gpt2Config, Gpt2DoubleHeads, Gpt2ForSequenceClassification,
    Gpt2ForTokenClassification, Gpt2LMHeadModel, HeadKind, InitialGradients, LogitsFor, Observer, Pass, Site,
    expected_parameters, gradients,
};
use candle_gpt2_arithmetic::RandomStream;
use candle_gpt2_kernels::composed;
use candle_gpt2_testing::{Fixture, assert_parity, device, dtype, pattern, values, worst};
use candle_nn::VarBuilder;

/// Absolute tolerance for logits; the requirement is 1e-4.
const LOGITS: f64 = 1e-4;
/// Tolerance for gradients, relative to the largest value in the tensor; the requirement is 1e-4.
const GRADIENTS: f64 = 1e-4;

const HEADS: [&str; 7] =
    ["sequence", "sequence_padded", "token", "double", "double_mean", "double_first", "double_last"];
const CROSS: [&str; 3] = ["cross", "cross_shared", "cross_upcast"];

struct Case {
    name: &'static str,
    fixture: Fixture,
    config: Gpt2Config,
    variables: HashMap<String, Var>,
}

impl Case {
    fn open(name: &'static str, dtype: DType, device: &Device) -> Result<Self> {
        let fixture = Fixture::open(&format!("gradients/{name}"));
        let config = Gpt2Config::from_json(&fixture.recorded()["config"].to_string()).unwrap();
        let variable = |(name, tensor): (String, Tensor)| {
            Ok((name, Var::from_tensor(&tensor.to_device(device)?.to_dtype(dtype)?)?))
        };
        let variables =
            fixture.tensors_below("parameter.").into_iter().map(variable).collect::<Result<_>>()?;
        Ok(Self { name, fixture, config, variables })
    }

    fn source(&self) -> ByOutput<'static> {
        let wte = self.variables["wte.weight"].as_tensor();
        let tensors =
            self.variables.iter().map(|(name, variable)| (name.clone(), variable.as_tensor().clone()));
        ByOutput(VarBuilder::from_tensors(tensors.collect(), wte.dtype(), wte.device()))
    }

    fn numbers(&self, name: &str) -> Vec<u32> {
        let tensor = self.fixture.tensor(name).flatten_all().unwrap().to_dtype(DType::U32).unwrap();
        tensor.to_vec1().unwrap()
    }

    fn rows(&self) -> Vec<Vec<u32>> {
        let ids = self.numbers("ids");
        let mut rest = ids.as_slice();
        let row = |length: u32| {
            let (row, others) = rest.split_at(length as usize);
            rest = others;
            row.to_vec()
        };
        self.numbers("lengths").into_iter().map(row).collect()
    }

    /// Runs the model on the rows, and returns each kind of logits with its name in the fixture.
    fn head_logits(&self, pass: &mut Pass) -> Result<Vec<(&'static str, Tensor)>> {
        let (rows, source) = (self.rows(), self.source());
        match self.config.head {
            HeadKind::SequenceClassification => {
                let model = Gpt2ForSequenceClassification::load(&self.config, source)?;
                Ok(vec![("logits", model.forward(&rows, pass)?)])
            }
            HeadKind::TokenClassification => {
                let model = Gpt2ForTokenClassification::load(&self.config, source)?;
                Ok(vec![("logits", model.forward(&rows, pass)?)])
            }
            HeadKind::DoubleHeads => {
                let model = Gpt2DoubleHeads::load(&self.config, source)?;
                let places: Vec<usize> =
                    self.numbers("places").into_iter().map(|place| place as usize).collect();
                let (logits, choices) = model.forward(&rows, Some(&places), pass)?;
                Ok(vec![("logits", logits.squeeze(0)?), ("choices", choices)])
            }
            HeadKind::LanguageModel => panic!("{}: expected a classification or double head", self.name),
        }
    }

    /// Computes the logits for the IDs, with cross-attention to `states`.
    fn cross_attention_logits(&self, states: &Tensor, pass: Pass) -> Result<Vec<(&'static str, Tensor)>> {
        let model = Gpt2LMHeadModel::load(&self.config, self.source())?;
        let ids = self.fixture.tensor("ids").to_dtype(DType::U32)?.to_device(model.device())?;
        let mut pass = pass.attending_to(states.clone());
        Ok(vec![("logits", model.forward_with(&ids, LogitsFor::EveryToken, None, &mut pass)?)])
    }

    /// Loss behind the fixture's gradients: a weighted sum of squares.
    fn loss(&self, outputs: Vec<(&'static str, Tensor)>) -> Result<Tensor> {
        let mut loss: Option<Tensor> = None;
        for (_, values) in outputs {
            let weights = pattern(values.dims(), 2.0, 11).to_dtype(values.dtype())?;
            let part = (values.sqr()? * weights)?.sum_all()?;
            loss = Some(match loss {
                Some(loss) => (loss + part)?,
                None => part,
            });
        }
        Ok(loss.expect("an output"))
    }

    /// Checks the loss, and the gradients of all parameters and of the tensors in `extra`.
    fn check(
        &self,
        variant: &str,
        extra: &[(&str, &Tensor)],
        compute: impl FnOnce() -> Result<Tensor>,
    ) -> Result<()> {
        let parameters = expected_parameters(&self.config);
        let parameters: Vec<&str> = parameters.iter().map(|parameter| parameter.name.as_str()).collect();
        let mut tensors: Vec<&Tensor> =
            parameters.iter().map(|name| self.variables[*name].as_tensor()).collect();
        let mut names: Vec<String> = parameters.iter().map(|name| format!("gradient.{name}")).collect();
        for (name, tensor) in extra {
            names.push(format!("gradient_of.{name}"));
            tensors.push(tensor);
        }
        assert_eq!(
            self.variables.len(),
            parameters.len(),
            "{}: every parameter is in the fixture",
            self.name
        );
        let (loss, found) = gradients(&tensors, InitialGradients::Nothing, 1.0, compute)?;
        let expected = values(&self.fixture.tensor("loss"))[0];
        assert!(
            (loss / expected - 1.0).abs() < 1e-4,
            "{}, {variant}: loss {loss}, expected {expected}",
            self.name
        );
        for (name, found) in names.iter().zip(found) {
            let found = found.unwrap_or_else(|| panic!("{}, {variant}: no {name}", self.name));
            let expected = self.fixture.tensor(name);
            assert_eq!(found.dims(), expected.dims(), "{}: {name}", self.name);
            let (found, expected) = (values(&found), values(&expected));
            let largest = worst(expected.iter().map(|value| value.abs()));
            let off = worst(found.iter().zip(&expected).map(|(found, expected)| (found - expected).abs()));
            assert!(largest > 0.0, "{}: {name} is zero in the fixture", self.name);
            assert!(
                off <= GRADIENTS * largest,
                "{}, {variant}: {name} is off by {off}, its largest value is {largest}",
                self.name
            );
        }
        Ok(())
    }
}

#[test]
fn logits_of_heads_equal_transformers() -> Result<()> {
    for name in HEADS {
        let case = Case::open(name, dtype(), &device())?;
        for (output, found) in case.head_logits(&mut Pass::inference())? {
            let expected = case.fixture.tensor(&format!("expected.{output}"));
            assert_parity(&found, &expected, LOGITS, &format!("{name}: {output}"));
        }
    }
    Ok(())
}

#[test]
fn gradients_with_heads_equal_transformers() -> Result<()> {
    for name in HEADS {
        for dtype in [DType::F32, DType::F64] {
            let case = Case::open(name, dtype, &Device::Cpu)?;
            let compute = |recomputing: bool| {
                let mut generator = RandomStream::new(1);
                let mut pass = Pass::training(&mut generator).recomputing(recomputing);
                case.loss(case.head_logits(&mut pass)?)
            };
            case.check(&format!("{dtype:?}"), &[], || compute(false))?;
            case.check(&format!("{dtype:?}, recomputed"), &[], || compute(true))?;
            composed(|| case.check(&format!("{dtype:?}, composed"), &[], || compute(false)))?;
        }
    }
    Ok(())
}

#[test]
fn forward_choices_equals_the_choices_of_forward() -> Result<()> {
    let case = Case::open("double", dtype(), &device())?;
    let model = Gpt2DoubleHeads::load(&case.config, case.source())?;
    let tokens = [0, 2, 1];
    let (_, from_both) = model.forward(&case.rows(), Some(&tokens), &mut Pass::inference())?;
    let alone = model.forward_choices(&case.rows(), Some(&tokens), &mut Pass::inference())?;
    assert_eq!(values(&alone), values(&from_both));
    let last: Vec<usize> = case.rows().iter().map(|row| row.len() - 1).collect();
    let named = model.forward_choices(&case.rows(), Some(&last), &mut Pass::inference())?;
    let unnamed = model.forward_choices(&case.rows(), None, &mut Pass::inference())?;
    assert_eq!(
        values(&named),
        values(&unnamed),
        "without explicit tokens, the last token summarizes each row"
    );
    let error_message = |tokens: &[usize]| {
        let found = model.forward_choices(&case.rows(), Some(tokens), &mut Pass::inference());
        found.unwrap_err().to_string()
    };
    let beyond = error_message(&[0, 6, 1]);
    assert!(
        beyond.contains("summary tokens: expected a token index from 0 to 5, found index 6 in row 1"),
        "{beyond}"
    );
    let too_few = error_message(&[0, 1]);
    assert!(
        too_few.contains("summary tokens: expected one token index for each of 3 rows, found indices [0, 1]"),
        "{too_few}"
    );
    Ok(())
}

#[test]
fn head_loads_only_from_its_own_kind_of_config() -> Result<()> {
    let case = Case::open("token", dtype(), &device())?;
    let error = Gpt2ForSequenceClassification::load(&case.config, case.source()).expect_err("another head");
    let expected = "expected a configuration for GPT2ForSequenceClassification, found one for GPT2ForTokenClassification";
    assert!(error.to_string().contains(expected), "{error}");
    for name in HEADS {
        let case = Case::open(name, DType::F32, &Device::Cpu)?;
        let counted: usize = case.variables.values().map(|variable| variable.elem_count()).sum();
        let size = match case.config.head {
            HeadKind::SequenceClassification => {
                let model = Gpt2ForSequenceClassification::load(&case.config, case.source())?;
                model.size()
            }
            HeadKind::TokenClassification => {
                let model = Gpt2ForTokenClassification::load(&case.config, case.source())?;
                model.size()
            }
            _ => {
                let model = Gpt2DoubleHeads::load(&case.config, case.source())?;
                model.size()
            }
        };
        assert_eq!((size.count, size.bytes), (counted, 4 * counted), "{name}");
    }
    Ok(())
}

/// Each of the heads' dropout rates takes effect, but only in training.
#[test]
fn head_dropout_acts_in_training_only() -> Result<()> {
    let still = |name| -> Result<(Case, Vec<f64>)> {
        let case = Case::open(name, DType::F32, &Device::Cpu)?;
        let mut generator = RandomStream::new(1);
        let outputs = case.head_logits(&mut Pass::training(&mut generator))?;
        let found = outputs.iter().flat_map(|(_, output)| values(output)).collect();
        Ok((case, found))
    };
    type Change = fn(&mut Gpt2Config);
    let changes: [(&str, Change); 3] = [
        ("token", |config| config.classifier_dropout = 0.5),
        ("double", |config| config.summary.first_dropout = 0.5),
        ("double", |config| config.summary.last_dropout = 0.5),
    ];
    for (name, change) in changes {
        let (mut case, without) = still(name)?;
        change(&mut case.config);
        let run = |pass: &mut Pass| -> Result<Vec<f64>> {
            Ok(case.head_logits(pass)?.iter().flat_map(|(_, output)| values(output)).collect())
        };
        let trained = |seed| run(&mut Pass::training(&mut RandomStream::new(seed)));
        assert_eq!(run(&mut Pass::inference())?, without, "{name}");
        assert_ne!(trained(1)?, without, "{name}");
        assert_eq!(trained(1)?, trained(1)?, "{name}");
        // Two dropout masks over a few values may be equal, but seven are not all equal.
        let others = (2..9).map(trained).collect::<Result<Vec<_>>>()?;
        assert!(others.iter().any(|other| *other != others[0]), "{name}");
    }
    Ok(())
}

#[test]
fn logits_of_cross_attention_equal_transformers() -> Result<()> {
    for name in CROSS {
        let case = Case::open(name, dtype(), &device())?;
        let states = case.fixture.tensor("states").to_device(&device())?;
        let found = &case.cross_attention_logits(&states, Pass::inference())?[0].1;
        assert_parity(found, &case.fixture.tensor("expected.logits"), LOGITS, name);
        let model = Gpt2LMHeadModel::load(&case.config, case.source())?;
        let ids = case.fixture.tensor("ids").to_dtype(DType::U32)?.to_device(&device())?;
        let without = model.forward_with(&ids, LogitsFor::EveryToken, None, &mut Pass::inference())?;
        assert_parity(
            &without,
            &case.fixture.tensor("expected.without"),
            LOGITS,
            &format!("{name}, without"),
        );
    }
    Ok(())
}

#[test]
fn gradients_with_cross_attention_equal_transformers() -> Result<()> {
    for name in CROSS {
        for dtype in [DType::F32, DType::F64] {
            let case = Case::open(name, dtype, &Device::Cpu)?;
            let states = Var::from_tensor(&case.fixture.tensor("states").to_dtype(dtype)?)?;
            let compute = |recomputing: bool| {
                let mut generator = RandomStream::new(1);
                let pass = Pass::training(&mut generator).recomputing(recomputing);
                case.loss(case.cross_attention_logits(&states, pass)?)
            };
            let extra = [("states", states.as_tensor())];
            case.check(&format!("{dtype:?}"), &extra, || compute(false))?;
            case.check(&format!("{dtype:?}, recomputed"), &extra, || compute(true))?;
            composed(|| case.check(&format!("{dtype:?}, composed"), &extra, || compute(false)))?;
            // Gradients for an encoder: here the states are not a variable, but depend on one.
            let encoded = |recomputing: bool| {
                let mut generator = RandomStream::new(1);
                let pass = Pass::training(&mut generator).recomputing(recomputing);
                let states = ((states.as_tensor() * 2.0)? * 0.5)?;
                case.loss(case.cross_attention_logits(&states, pass)?)
            };
            case.check(&format!("{dtype:?}, through an encoder"), &extra, || encoded(false))?;
            case.check(&format!("{dtype:?}, through an encoder, recomputed"), &extra, || encoded(true))?;
        }
    }
    Ok(())
}

/// Covers batches, cached chunks of different sizes, and packed rows of different lengths.
#[test]
fn encoder_states_are_attended_in_every_kind_of_pass() -> Result<()> {
    let case = Case::open("cross_shared", dtype(), &device())?;
    let states = case.fixture.tensor("states").to_device(&device())?;
    let without = Gpt2LMHeadModel::load(&case.config, case.source())?;
    let model = without.clone().with_encoder_states(&states)?;
    assert!(model.has_encoder_states() && !without.has_encoder_states());
    let expected = case.fixture.tensor("expected.logits");
    let ids = case.fixture.tensor("ids").to_dtype(DType::U32)?.to_device(&device())?; // (3, 6)
    let every = |model: &Gpt2LMHeadModel, pass: &mut Pass| {
        model.forward_with(&ids, LogitsFor::EveryToken, None, pass)
    };
    let batch = every(&model, &mut Pass::inference())?;
    assert_parity(&batch, &expected, LOGITS, "a batch");
    // Later variants are compared with this batch, because unscaled scores amplify half-precision rounding.
    let batch = batch.to_device(&Device::Cpu)?;
    let stateless = every(&without, &mut Pass::inference())?;
    assert_parity(
        &stateless,
        &case.fixture.tensor("expected.without"),
        LOGITS,
        "the original model without states",
    );

    let mut cache = Gpt2Cache::new(model.config(), 3, 6, dtype(), &device())?;
    let mut pieces = Vec::new();
    for (first, count) in [(0, 3), (3, 1), (4, 1), (5, 1)] {
        let part = ids.narrow(1, first, count)?;
        let pass = &mut Pass::inference();
        pieces.push(model.forward_with(&part, LogitsFor::EveryToken, Some(&mut cache), pass)?);
    }
    assert_parity(&Tensor::cat(&pieces, 1)?, &batch, LOGITS, "in chunks");

    let rows =
        [ids.get(0)?.to_vec1::<u32>()?, ids.get(1)?.narrow(0, 0, 2)?.to_vec1()?, ids.get(2)?.to_vec1()?];
    let hidden = model.transformer().forward_rows(&rows, &mut Pass::inference())?;
    let found = model.lm_head().forward(&hidden)?.squeeze(0)?;
    let of_rows = [batch.get(0)?, batch.get(1)?.narrow(0, 0, 2)?, batch.get(2)?];
    assert_parity(&found, &Tensor::cat(&of_rows, 0)?, LOGITS, "rows of any lengths");

    // A pass's own states replace the model's, even if each row of the batch has separate states.
    let zeros = states.zeros_like()?;
    let of_pass = every(&without, &mut Pass::inference().attending_to(zeros.clone()))?;
    let replaced = every(&model, &mut Pass::inference().attending_to(zeros))?;
    assert_eq!(values(&replaced), values(&of_pass));
    let for_each_row = states.repeat((3, 1, 1))?;
    let found = every(&without, &mut Pass::inference().attending_to(for_each_row))?;
    assert_parity(&found, &expected, LOGITS, "states for each row");
    Ok(())
}

/// Hook points refer to self-attention, so cross-attention must not show up under them.
#[test]
fn cross_attention_has_no_hook_points() -> Result<()> {
    let case = Case::open("cross", dtype(), &device())?;
    let model = Gpt2LMHeadModel::load(&case.config, case.source())?;
    let states = case.fixture.tensor("states").to_device(&device())?;
    let ids = case.fixture.tensor("ids").to_dtype(DType::U32)?.to_device(&device())?;
    let seen = |attending: bool| -> Result<Vec<(String, Vec<usize>)>> {
        let mut all = All(Vec::new());
        let pass = Pass::inference().observed_by(&mut all);
        let mut pass = if attending { pass.attending_to(states.clone()) } else { pass };
        model.forward_with(&ids, LogitsFor::EveryToken, None, &mut pass)?;
        Ok(all.0)
    };
    let with = seen(true)?;
    assert_eq!(with, seen(false)?);
    assert_eq!(with.iter().filter(|(site, _)| site == "blocks.1.attn.hook_pattern").count(), 1);
    Ok(())
}

struct All(Vec<(String, Vec<usize>)>);

impl Observer for All {
    fn wants(&self, _: Site) -> bool {
        true
    }

    fn observe(&mut self, site: Site, value: Tensor) -> Result<Tensor> {
        self.0.push((site.to_string(), value.dims().to_vec()));
        Ok(value)
    }
}

#[test]
fn mismatched_states_are_rejected() -> Result<()> {
    let case = Case::open("cross", dtype(), &device())?;
    let model = Gpt2LMHeadModel::load(&case.config, case.source())?;
    let ids = Tensor::zeros((2, 3), DType::U32, &device())?;
    let of_pass = |shape: &[usize], dtype: DType| {
        let states = Tensor::zeros(shape, dtype, &device()).unwrap();
        let mut pass = Pass::inference().attending_to(states);
        model.forward_with(&ids, LogitsFor::LastToken, None, &mut pass).map(|_| ())
    };
    assert!(of_pass(&[2, 5, 32], dtype()).is_ok() && of_pass(&[1, 1, 32], dtype()).is_ok());
    for shape in [&[3, 5, 32][..], &[2, 5, 31], &[2, 0, 32], &[5, 32]] {
        let found = of_pass(shape, dtype()).unwrap_err().to_string();
        let expected =
            format!("expected floating-point numbers of shape (1, S, 32) or (2, S, 32), found ({shape:?}, ");
        assert!(found.contains(&expected), "{found}");
    }
    let found = of_pass(&[1, 5, 32], DType::U32).expect_err("whole numbers").to_string();
    assert!(found.contains("found ([1, 5, 32], U32)"), "{found}");
    let two = Tensor::zeros((2, 5, 32), dtype(), &device())?;
    let found = model
        .clone()
        .with_encoder_states(&two)
        .expect_err("states must be the same for all rows")
        .to_string();
    assert!(found.contains("of shape (1, S, 32), found ([2, 5, 32], "), "{found}");

    let plain = Gpt2Config { add_cross_attention: false, ..case.config.clone() };
    let plain = Gpt2LMHeadModel::load(&plain, case.source())?;
    let one = Tensor::zeros((1, 5, 32), dtype(), &device())?;
    let mut pass = Pass::inference().attending_to(one.clone());
    for result in [
        plain.forward_with(&ids, LogitsFor::LastToken, None, &mut pass).map(|_| ()),
        plain.clone().with_encoder_states(&one).map(|_| ()),
    ] {
        let found = result.expect_err("no cross-attention").to_string();
        assert!(found.contains("the model has no cross-attention"), "{found}");
    }
    Ok(())
}
