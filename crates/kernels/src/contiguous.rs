//! Tensors with contiguous values.

use candle_core::{DType, Device, Result, Storage, Tensor, WithDType};
use half::{bf16, f16};

/// Faster [`Tensor::contiguous`] for transposed matrices on the CPU, without gradients.
///
/// This is many times faster than candle's copy, which computes each value's index separately and reads a
/// cache line again for every value in the line.
/// ```
/// use candle_core::{Device, Tensor};
///
/// let matrix = Tensor::new(&[[1f32, 2., 3.], [4., 5., 6.]], &Device::Cpu)?;
/// let transpose = candle_gpt2_kernels::contiguous(&matrix.t()?)?;
/// assert!(transpose.is_contiguous());
/// assert_eq!(transpose.to_vec2::<f32>()?, [[1., 4.], [2., 5.], [3., 6.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// If allocation fails.
pub fn contiguous(tensor: &Tensor) -> Result<Tensor> {
    match (tensor.stride(), tensor.dtype()) {
        (&[1, distance], DType::F32) if distance > 1 => transposed::<f32>(tensor, distance),
        (&[1, distance], DType::F16) if distance > 1 => transposed::<f16>(tensor, distance),
        (&[1, distance], DType::BF16) if distance > 1 => transposed::<bf16>(tensor, distance),
        _ => tensor.contiguous(),
    }
}

/// Copies a column-major matrix into row-major order.
///
/// The values of a column are adjacent; the values of a row are `distance` elements apart. The copy works in
/// blocks, so that each cache line is read and written once.
fn transposed<T: WithDType>(matrix: &Tensor, distance: usize) -> Result<Tensor> {
    /// Side length of a block: one cache line of f32 values.
    const SIDE: usize = 16;
    let (rows, columns) = matrix.dims2()?;
    let (storage, layout) = matrix.storage_and_layout();
    let Storage::Cpu(values) = &*storage else { return matrix.contiguous() };
    let values = &T::cpu_storage_as_slice(values)?[layout.start_offset()..];
    let mut copied = vec![T::zero(); rows * columns];
    for top in (0..rows).step_by(SIDE) {
        let height = SIDE.min(rows - top);
        for left in (0..columns).step_by(SIDE) {
            let width = SIDE.min(columns - left);
            let mut block = [[T::zero(); SIDE]; SIDE];
            for column in 0..width {
                let values = &values[(left + column) * distance + top..][..height];
                for (row, value) in block.iter_mut().zip(values) {
                    row[column] = *value;
                }
            }
            for (row, values) in block[..height].iter().enumerate() {
                copied[(top + row) * columns + left..][..width].copy_from_slice(&values[..width]);
            }
        }
    }
    Tensor::from_vec(copied, (rows, columns), &Device::Cpu)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Covers complete and partial blocks, entire matrices and views, in every dtype.
    #[test]
    fn contiguous_transpose_equals_candle() {
        for (rows, columns) in [(1, 5), (5, 1), (16, 16), (17, 40), (40, 17), (33, 64)] {
            let matrix = Tensor::arange(0f32, (rows * columns) as f32, &Device::Cpu).unwrap();
            let matrix = matrix.reshape((columns, rows)).unwrap();
            for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64] {
                let transpose = matrix.to_dtype(dtype).unwrap().t().unwrap();
                let part = transpose.narrow(0, rows / 2, rows - rows / 2).unwrap();
                let other = transpose.narrow(1, columns / 2, columns - columns / 2).unwrap();
                for view in [&transpose, &part, &other, &transpose.t().unwrap()] {
                    let values =
                        |tensor: &Tensor| tensor.to_dtype(DType::F32).unwrap().to_vec2::<f32>().unwrap();
                    let copied = contiguous(view).unwrap();
                    assert!(copied.is_contiguous() && copied.dtype() == dtype);
                    assert_eq!(values(&copied), values(view), "{rows} x {columns}, {dtype:?}");
                }
            }
        }
    }
}
