//! What a model needs is told before it is read, and what has no room in a page is refused with the figures.

use std::io;
use std::sync::Arc;

use candle_gpt2::{Gpt2Config, expected_parameters};
use candle_gpt2_browser::{check_room, memory};
use candle_gpt2_engine::{DeviceChoice, ModelOptions, WeightDType};
use candle_gpt2_weights::{Checkpoint, GivenFiles, OpenOptions, Orientation, ReadAt, checkpoint_shape};
use serde_json::{Map, Value, json};

/// A file whose beginning is this, and which is zero behind it.
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

/// A published model in f32 as its header alone.
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
fn a_model_without_room_is_refused_with_the_figures() {
    let (small, xl) = (opened("gpt2"), opened("gpt2-xl"));
    let in_type = |checkpoint: &Checkpoint, dtype| memory(checkpoint, &held_in(dtype)).unwrap();
    // 124 million parameters of four bytes, and 2 · 1024 tokens of 2 · 12 · 768 numbers; about as much again of what is computed.
    let (weights, kv) = (124_439_808 * 4, 2 * 1024 * 2 * 12 * 768 * 4);
    let f32 = in_type(&small, Some(WeightDType::F32));
    assert!((weights + kv..weights + kv + (100 << 20)).contains(&f32), "{f32}");
    let q8 = in_type(&small, Some(WeightDType::Q8));
    assert!(q8 < f32 / 2 && q8 > 124_439_808, "{q8}");
    for dtype in [None, Some(WeightDType::F32), Some(WeightDType::Q4)] {
        assert!(check_room(&small, &held_in(dtype)).is_ok(), "{dtype:?}");
    }
    assert!(check_room(&xl, &held_in(Some(WeightDType::Q8))).is_ok());
    for dtype in [None, Some(WeightDType::F32)] {
        let error = check_room(&xl, &held_in(dtype)).unwrap_err();
        let told = error.to_string();
        // Six of them are the weights'.
        let figures =
            "this model needs 7.6 GB of memory, and a page has 4.3 GB at most; it has room in f16 (";
        assert!(error.is_usage() && told.starts_with(figures), "{told}");
        assert!(told.contains("q8 (") && told.contains("q4 ("), "{told}");
    }
}
