//! Embedding lookup by ID.

use std::sync::Arc;

use candle_core::{DType, Device, IndexOp, Tensor, Var};
use candle_gpt2_arithmetic::NumberType;
use candle_gpt2_kernels::{AdaptedMatrix, Linear, Matrix, expect_ids};
use candle_gpt2_testing::{pattern, values};

/// Every kind of weight must check IDs itself.
///
/// candle would return zeros for the largest value of the index dtype.
#[test]
fn out_of_range_ids_are_rejected_by_every_weight_kind() {
    let table = pattern(&[5, 64], 1.0, 3);
    let (a, b) = (pattern(&[2, 64], 1.0, 1), pattern(&[5, 2], 1.0, 2));
    let adapted = AdaptedMatrix::new(Matrix::Dense(table.clone()), a, b, 0.5).unwrap();
    let tracked = Var::from_tensor(&table).unwrap().into_inner();
    for (name, weight) in [
        ("dense", Matrix::Dense(table.clone())),
        ("bf16", Matrix::Dense(table.to_dtype(DType::BF16).unwrap())),
        ("tracked", Matrix::Dense(tracked)),
        ("packed", Matrix::pack(&table, NumberType::F32).unwrap()),
        ("adapted", Matrix::Adapted(Arc::new(adapted))),
    ] {
        let layer = Linear::from_matrix(weight, None).unwrap();
        for id in [5, 6, u32::MAX - 1, u32::MAX] {
            let ids = Tensor::new(&[[0, 4], [id, 1]], &Device::Cpu).unwrap();
            let error = layer.embedding(&ids).unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("embedding: row {id} is out of range; the table has 5 rows")),
                "{name}: {error}"
            );
        }
        let negative = Tensor::new(&[1i64, -1], &Device::Cpu).unwrap();
        let error = layer.embedding(&negative).unwrap_err().to_string();
        assert!(
            error.starts_with("embedding: row -1 is out of range; the table has 5 rows"),
            "{name}: {error}"
        );
        let ids = Tensor::new(&[[0u32, 4], [3, 1]], &Device::Cpu).unwrap();
        let rows = layer.embedding(&ids).unwrap();
        assert_eq!(rows.dims(), [2, 2, 64], "{name}");
        let expected = layer.weight().to_tensor().unwrap().i(4).unwrap();
        let found = rows.i((0, 1)).unwrap();
        assert_eq!(values(&found), values(&expected), "{name}");
        let on_device = layer.embedding_on_device(&ids).unwrap();
        assert_eq!(values(&on_device), values(&rows), "{name}");
        let none = Tensor::zeros((2, 0), DType::U32, &Device::Cpu).unwrap();
        assert_eq!(layer.embedding(&none).unwrap().dims(), [2, 0, 64], "{name}");
    }
    let signed = |id: i64| expect_ids(&Tensor::new(&[id], &Device::Cpu).unwrap(), 5);
    assert!(signed(4).is_ok() && signed(5).is_err() && signed(-1).is_err() && signed((1 << 32) + 1).is_err());
    assert!(expect_ids(&Tensor::new(&[1f32], &Device::Cpu).unwrap(), 5).is_err());
}
