//! AMX: byte products in tile registers, and a scalar model of the instructions that they use.
//!
//! A tile is a register of up to 16 rows of 64 bytes. One instruction multiplies 16 rows of activations by
//! the weights for 16 outputs, over one group of inputs. [`ByteLines`] already have the byte order that the
//! instruction reads. Integer sums are exact, so the results are the same as on every other instruction set.

#![expect(unsafe_code, reason = "only inline assembly can use tiles in stable Rust")]

use std::mem::MaybeUninit;
use std::sync::OnceLock;

use super::vectors::{BYTE_INPUTS, BYTE_LINES, ByteGroup, ByteLines, GROUP, LANES, Line, pack_quad};

/// Number of activation rows in a tile.
pub(crate) const TILE_ROWS: usize = 16;
/// Index of the tile that holds activations.
const ACTIVATIONS: usize = 0;
/// Index of the tile that holds weights.
const WEIGHTS: usize = 1;
/// Index of the tile that accumulates sums.
const SUMS: usize = 2;

/// Sums of products, one for each row and output.
pub(crate) type TileSums = [Line<[i32; LANES]>; TILE_ROWS];

/// All-zero sums.
const NO_SUMS: TileSums = [Line([0; LANES]); TILE_ROWS];

/// Operand of `ldtilecfg`: the number of rows of each tile, and the number of bytes per row.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

#[expect(clippy::cast_possible_truncation, reason = "tiles have at most 16 rows of 64 bytes")]
static CONFIG: TileConfig = {
    let mut config =
        TileConfig { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
    (config.rows[ACTIVATIONS], config.row_bytes[ACTIVATIONS]) = (TILE_ROWS as u8, GROUP as u16);
    (config.rows[WEIGHTS], config.row_bytes[WEIGHTS]) = (BYTE_LINES as u8, (BYTE_INPUTS * LANES) as u16);
    (config.rows[SUMS], config.row_bytes[SUMS]) = (TILE_ROWS as u8, (4 * LANES) as u16);
    config
};

/// Instructions that an AVX-512 processor uses to multiply bytes.
pub(crate) trait ByteProducts: Copy {
    /// Whether the processor has VNNI.
    const HAS_VNNI: bool;
    /// Whether products of many rows are computed in tiles.
    const HAS_TILES: bool = false;

    /// Returns proof that the processor supports these instructions.
    fn detect() -> Option<Self>;

    /// Sets the sizes of this thread's tiles, as required before any product.
    #[inline(always)]
    fn configure(self) {}

    /// Frees this thread's tiles, so that context switches do not save them.
    #[inline(always)]
    fn release(self) {}

    /// Computes the sums of `w · x` over 32 inputs for each row and output, in tiles.
    ///
    /// `w` is a weight with its offset, and `x` is one of the row's integers.
    #[inline(always)]
    fn multiply(self, _: &[ByteGroup; TILE_ROWS], _: &ByteLines) -> TileSums {
        NO_SUMS
    }
}

/// Byte products without VNNI: two products are added in 16 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pairs;

impl ByteProducts for Pairs {
    const HAS_VNNI: bool = false;

    fn detect() -> Option<Self> {
        Some(Self)
    }
}

/// Proof that the processor supports AVX512-VNNI.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Vnni(());

impl ByteProducts for Vnni {
    const HAS_VNNI: bool = true;

    fn detect() -> Option<Self> {
        is_x86_feature_detected!("avx512vnni").then_some(Self(()))
    }
}

/// Proof that the processor supports VNNI and AMX-INT8, and that this process may use tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Amx(());

/// State of AMX on this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Availability {
    /// The processor does not support AMX-INT8.
    Absent,
    /// The system does not let this process use AMX, or a test product was wrong.
    Refused,
    /// This process can use AMX.
    Usable(Amx),
}

impl Availability {
    /// Queries the processor and then the system, once per process.
    pub(crate) fn detect() -> Self {
        static FOUND: OnceLock<Availability> = OnceLock::new();
        *FOUND.get_or_init(|| {
            if !has_byte_tiles() {
                return Self::Absent;
            }
            if !is_permitted() {
                return Self::Refused;
            }
            // Few test machines have tiles, so each process compares one product with the model.
            let amx = Amx(());
            if computes_like_model(amx, &mixed_operands()) { Self::Usable(amx) } else { Self::Refused }
        })
    }
}

/// Whether the processor reports support for tiles and for byte products in tiles.
fn has_byte_tiles() -> bool {
    const BYTE_PRODUCTS: u32 = 1 << 25;
    const TILE_REGISTERS: u32 = 1 << 24;
    if cfg!(miri) || std::arch::x86_64::__cpuid(0).eax < 7 {
        return false;
    }
    let features = std::arch::x86_64::__cpuid_count(7, 0).edx;
    features & BYTE_PRODUCTS != 0 && features & TILE_REGISTERS != 0
}

/// Whether the system grants this process permission to use tiles, which this function requests.
#[cfg(target_os = "linux")]
fn is_permitted() -> bool {
    /// Linux constant `ARCH_REQ_XCOMP_PERM`.
    const REQUEST_PERMISSION: libc::c_long = 0x1023;
    /// Linux constant `XFEATURE_XTILEDATA`.
    const TILE_DATA: libc::c_long = 18;
    // SAFETY: the call passes two integers and changes nothing but the permission.
    unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0 }
}

/// Returns false, because permission is requested only on Linux.
#[cfg(not(target_os = "linux"))]
fn is_permitted() -> bool {
    false
}

/// Returns operands whose bytes follow no simple pattern.
fn mixed_operands() -> ([ByteGroup; TILE_ROWS], ByteLines) {
    let mut rows = [ByteGroup::default(); TILE_ROWS];
    let mut weights: ByteLines = [[0; BYTE_INPUTS * LANES]; BYTE_LINES];
    let mut value = 0u8;
    let mut next = || {
        value = value.wrapping_mul(13).wrapping_add(57);
        value
    };
    for row in &mut rows {
        row.quants = std::array::from_fn(|_| pack_quad(std::array::from_fn(|_| next().cast_signed())));
    }
    weights.as_flattened_mut().fill_with(next);
    (rows, weights)
}

/// Whether `tiles` and [`Model`] compute the same product of these operands.
fn computes_like_model<T: ByteProducts>(
    tiles: T,
    (rows, weights): &([ByteGroup; TILE_ROWS], ByteLines),
) -> bool {
    tiles.configure();
    let sums = tiles.multiply(rows, weights);
    tiles.release();
    Model.configure();
    let expected = Model.multiply(rows, weights);
    sums.iter().zip(&expected).all(|(sums, expected)| sums.0 == expected.0)
}

impl ByteProducts for Amx {
    const HAS_VNNI: bool = true;
    const HAS_TILES: bool = true;

    fn detect() -> Option<Self> {
        match Availability::detect() {
            Availability::Usable(amx) => Vnni::detect().map(|_| amx),
            Availability::Absent | Availability::Refused => None,
        }
    }

    #[inline(always)]
    fn configure(self) {
        // SAFETY: `self` proves that the processor has tiles and that this process may use them. The
        // configuration has 64 bytes and describes tiles of at most 16 rows of 64 bytes.
        unsafe {
            std::arch::asm!("ldtilecfg [{}]", in(reg) &raw const CONFIG, options(nostack, preserves_flags, readonly));
        }
    }

    #[inline(always)]
    fn release(self) {
        // SAFETY: `self` proves that the processor has tiles.
        unsafe { std::arch::asm!("tilerelease", options(nostack, preserves_flags, nomem)) };
    }

    #[inline(always)]
    fn multiply(self, rows: &[ByteGroup; TILE_ROWS], weights: &ByteLines) -> TileSums {
        let mut sums = MaybeUninit::<TileSums>::uninit();
        // SAFETY: `self` proves that the processor has tiles. With the sizes of `CONFIG`, the loads read the
        // first 32 bytes of each of 16 groups, and 8 lines of 64 bytes. The store writes all of the sums.
        unsafe {
            std::arch::asm!(
                "tileloadd tmm0, [{rows} + {group_bytes}]",
                "tileloadd tmm1, [{weights} + {line_bytes}]",
                "tilezero tmm2",
                "tdpbsud tmm2, tmm0, tmm1",
                "tilestored [{sums} + {line_bytes}], tmm2",
                rows = in(reg) rows.as_ptr(),
                group_bytes = in(reg) size_of::<ByteGroup>(),
                weights = in(reg) weights.as_ptr(),
                line_bytes = in(reg) BYTE_INPUTS * LANES,
                sums = in(reg) sums.as_mut_ptr(),
                out("tmm0") _,
                out("tmm1") _,
                out("tmm2") _,
                options(nostack, preserves_flags),
            );
            sums.assume_init()
        }
    }
}

/// Scalar model of the tile instructions, which runs on every processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Model;

/// Tile in the model.
struct ModelTile {
    rows: usize,
    row_bytes: usize,
    bytes: [[u8; 64]; 16],
}

impl ModelTile {
    /// Models `tilezero`: returns an all-zero tile of the configured size.
    fn zero(tile: usize) -> Self {
        let (rows, row_bytes) = (usize::from(CONFIG.rows[tile]), usize::from(CONFIG.row_bytes[tile]));
        Self { rows, row_bytes, bytes: [[0; 64]; 16] }
    }

    /// Models `tileloadd`: loads a tile from the rows that `row` returns.
    fn load<'a>(tile: usize, row: impl Fn(usize) -> &'a [u8]) -> Self {
        let mut loaded = Self::zero(tile);
        for index in 0..loaded.rows {
            loaded.bytes[index][..loaded.row_bytes].copy_from_slice(&row(index)[..loaded.row_bytes]);
        }
        loaded
    }

    /// Returns the four bytes of a row at a four-byte column.
    fn quad(&self, row: usize, column: usize) -> [u8; 4] {
        self.bytes[row].as_chunks().0[column]
    }

    /// Models `tdpbsud`: adds the products of signed bytes of `a` and unsigned bytes of `b`.
    fn add_products(&mut self, a: &Self, b: &Self) {
        let fits = self.rows == a.rows && self.row_bytes == b.row_bytes && a.row_bytes == 4 * b.rows;
        assert!(fits, "tiles of these sizes cannot be multiplied");
        for row in 0..self.rows {
            for column in 0..self.row_bytes / 4 {
                let mut sum = i32::from_le_bytes(self.quad(row, column));
                for inner in 0..b.rows {
                    for (a, b) in a.quad(row, inner).into_iter().zip(b.quad(inner, column)) {
                        sum = sum.wrapping_add(i32::from(a.cast_signed()) * i32::from(b));
                    }
                }
                self.bytes[row][4 * column..4 * column + 4].copy_from_slice(&sum.to_le_bytes());
            }
        }
    }
}

impl ByteProducts for Model {
    const HAS_VNNI: bool = false;
    const HAS_TILES: bool = true;

    fn detect() -> Option<Self> {
        Some(Self)
    }

    fn configure(self) {
        #[cfg(test)]
        tests::IS_CONFIGURED.set(true);
    }

    fn release(self) {
        #[cfg(test)]
        tests::IS_CONFIGURED.set(false);
    }

    fn multiply(self, rows: &[ByteGroup; TILE_ROWS], weights: &ByteLines) -> TileSums {
        #[cfg(test)]
        assert!(tests::IS_CONFIGURED.get(), "tiles must be configured before they are multiplied");
        let bytes = rows.map(|row| row.quants.map(i32::to_le_bytes));
        let a = ModelTile::load(ACTIVATIONS, |row| bytes[row].as_flattened());
        let b = ModelTile::load(WEIGHTS, |line| &weights[line]);
        let mut products = ModelTile::zero(SUMS);
        products.add_products(&a, &b);
        let sum = |row, column| i32::from_le_bytes(products.quad(row, column));
        std::array::from_fn(|row| Line(std::array::from_fn(|column| sum(row, column))))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::simd::unpack_quad;

    thread_local! {
        /// Whether this thread has configured tiles in the model.
        pub(super) static IS_CONFIGURED: Cell<bool> = const { Cell::new(false) };
    }

    /// Returns operands that vary by row, column and input and include the smallest and largest bytes.
    #[expect(clippy::cast_possible_truncation, reason = "remainders of 255 and 256 are bytes")]
    fn operands() -> ([ByteGroup; TILE_ROWS], ByteLines) {
        let mut rows = [ByteGroup::default(); TILE_ROWS];
        for (index, row) in rows.iter_mut().enumerate() {
            for (line, quad) in row.quants.iter_mut().enumerate() {
                let byte = |input: usize| ((37 * index + 11 * line + 71 * input) % 255) as u8;
                *quad = pack_quad(std::array::from_fn(|input| byte(input).wrapping_sub(127).cast_signed()));
            }
        }
        let mut weights = [[0; BYTE_INPUTS * LANES]; BYTE_LINES];
        for (index, weight) in weights.as_flattened_mut().iter_mut().enumerate() {
            *weight = (index * 29 % 256) as u8;
        }
        weights[0] = [255; BYTE_INPUTS * LANES];
        (rows, weights)
    }

    #[test]
    fn tiles_sum_the_products_of_each_row_and_output() {
        let (rows, weights) = operands();
        Model.configure();
        let sums = Model.multiply(&rows, &weights);
        for row in 0..TILE_ROWS {
            for output in 0..LANES {
                let mut expected = 0;
                for line in 0..BYTE_LINES {
                    for (input, x) in unpack_quad(rows[row].quants[line]).into_iter().enumerate() {
                        expected += x * i32::from(weights[line][output * BYTE_INPUTS + input]);
                    }
                }
                assert_eq!(sums[row].0[output], expected, "row {row}, output {output}");
            }
        }
    }

    /// Compares the processor's tiles with the model; without tiles, only the model runs.
    #[test]
    fn the_processor_computes_like_the_model() {
        assert!(computes_like_model(Model, &operands()));
        match Availability::detect() {
            Availability::Usable(amx) => assert!(computes_like_model(amx, &operands())),
            Availability::Refused => {
                assert!(!is_permitted(), "the processor's tiles do not compute like the model");
            }
            Availability::Absent => assert!(!has_byte_tiles()),
        }
    }
}
