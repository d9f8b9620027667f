//! Interrupted products, and products that are split into parts so that they can be interrupted.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{Device, Tensor};
use candle_gpt2_arithmetic::{MatrixBytes, NumberType, PackedMatrix, StoredOrder};
use candle_gpt2_kernels::{Activation, Linear, Matrix, interruptible};

/// Number of rows, more than fit into one part: 2³³ multiply-adds, or 128 rows of this width.
const ROWS: usize = 150;
const WIDTHS: (usize, usize) = (8192, 8192);

#[test]
fn split_product_is_identical_and_interruptible() {
    let (outputs, inputs) = WIDTHS;
    let bytes: Vec<u8> =
        (0..outputs * inputs).flat_map(|place| ((place % 251) as f32 / 251.0 - 0.5).to_le_bytes()).collect();
    let (dtype, order) = (NumberType::F32, StoredOrder::OutputMajor);
    let matrix = MatrixBytes { bytes: &bytes, dtype, order, out_features: outputs, in_features: inputs };
    let packed = PackedMatrix::from_bytes(matrix, NumberType::Q8, &|_| ()).unwrap();
    let layer = Linear::from_matrix(Matrix::Packed(Arc::new(packed)), None).unwrap();
    let x = Tensor::rand(-1f32, 1f32, (ROWS, inputs), &Device::Cpu).unwrap();
    let residual = Tensor::rand(-1f32, 1f32, (ROWS, outputs), &Device::Cpu).unwrap();
    let polls = Arc::new(AtomicUsize::new(0));
    let interrupt_after = |most: usize| {
        let polls = Arc::clone(&polls);
        polls.store(0, Ordering::Relaxed);
        Arc::new(move || polls.fetch_add(1, Ordering::Relaxed) >= most)
    };
    let bits = |y: &Tensor| -> Vec<u32> {
        y.flatten_all().unwrap().to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
    };
    for product in
        [&(|| layer.forward_added(&x, &residual)) as &dyn Fn() -> candle_core::Result<Tensor>, &|| {
            layer.forward_activated(&x, Activation::GeluTanh)
        }]
    {
        let whole = product().unwrap();
        let in_parts = interruptible(interrupt_after(usize::MAX), product).unwrap();
        assert_eq!(bits(&in_parts), bits(&whole));
        assert_eq!(polls.load(Ordering::Relaxed), 3, "before the first part and before each of the two");
        for most in 0..3 {
            let error = interruptible(interrupt_after(most), product).unwrap_err().to_string();
            assert!(error.starts_with("the computation was interrupted"), "{error}");
        }
    }
}
