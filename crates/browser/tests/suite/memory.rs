//! Tests memory estimates and the errors for models that do not fit into a page's memory.

use std::io;
use std::sync::Arc;

use candle_gpt2::{Gpt2Config, expected_parameters};
use candle_gpt2_browser::{check_memory, memory};
use candle_gpt2_engine::{DeviceChoice, ModelOptions, WeightDType};
use candle_gpt2_weights::{Checkpoint, GivenFiles, OpenOptions, Orientation, ReadAt, checkpoint_shape};
use serde_json::{Map, Value, json};

/// File that begins with these bytes and continues with zeros.
#[derive(Debug)]
struct Beginning {
    bytes: Vec<u8>,
    len: u64,
}

impl ReadAt for Beginning {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, start: u64, to: &mut [u8]) -> io::Result<()> {
        let held = usize::try_from(start).ok().and_then(|start| self.bytes.get(start..)).unwrap_or_default();
        to.fill(0);
        to.iter_mut().zip(held).for_each(|(to, byte)| *to = *byte);
        Ok(())
    }
}

/// Opens a checkpoint with a published model's shapes, in f32 and with all weights 0.
fn opened(preset: &str) -> Checkpoint {
    let config = Gpt2Config::preset(preset).unwrap();
    let (mut header, mut end) = (Map::new(), 0_u64);
    for parameter in expected_parameters(&config) {
        let shape = checkpoint_shape(&parameter, Orientation::Conv1D);
        let start = end;
        end += 4 * shape.iter().map(|length| *length as u64).product::<u64>();
        header
            .insert(parameter.name, json!({ "dtype": "F32", "shape": shape, "data_offsets": [start, end] }));
    }
    let header = Value::Object(header).to_string().into_bytes();
    let bytes = [(header.len() as u64).to_le_bytes().to_vec(), header].concat();
    let len = bytes.len() as u64 + end;
    let files = GivenFiles::new(preset)
        .with_bytes("config.json", config.to_json().to_string().into_bytes())
        .with_file("model.safetensors", Arc::new(Beginning { bytes, len }));
    Checkpoint::open_given(files, &OpenOptions::default(), &|_| ()).unwrap()
}

fn held_in(dtype: Option<WeightDType>) -> ModelOptions {
    ModelOptions { dtype, device: DeviceChoice::Cpu, ..ModelOptions::default() }
}

#[test]
fn model_larger_than_the_memory_is_rejected_with_both_sizes() {
    let (small, xl) = (opened("gpt2"), opened("gpt2-xl"));
    let in_type = |checkpoint: &Checkpoint, dtype| memory(checkpoint, &held_in(dtype)).unwrap();
    // 124 million parameters of four bytes each, and 2 · 1024 tokens with 2 · 12 · 768 numbers of four bytes
    // each. The rest, up to 100 MiB, is for computed values.
    let (weights, kv) = (124_439_808 * 4, 2 * 1024 * 2 * 12 * 768 * 4);
    let f32 = in_type(&small, Some(WeightDType::F32));
    assert!((weights + kv..weights + kv + (100 << 20)).contains(&f32), "{f32}");
    let q8 = in_type(&small, Some(WeightDType::Q8));
    assert!(q8 < f32 / 2 && q8 > 124_439_808, "{q8}");
    for dtype in [None, Some(WeightDType::F32), Some(WeightDType::Q4)] {
        assert!(check_memory(&small, &held_in(dtype)).is_ok(), "{dtype:?}");
    }
    assert!(check_memory(&xl, &held_in(Some(WeightDType::Q8))).is_ok());
    for dtype in [None, Some(WeightDType::F32)] {
        let error = check_memory(&xl, &held_in(dtype)).unwrap_err();
        let message = error.to_string();
        // The weights alone need six of the 7.6 GB.
        let figures = "this model needs 7.6 GB of memory, but a page has at most 4.3 GB; it fits in f16 (";
        assert!(error.is_usage() && message.starts_with(figures), "{message}");
        assert!(message.contains("q8 (") && message.contains("q4 ("), "{message}");
    }
}
