//! Thread pool, and partitioning of an output for its threads.

mod parts;
mod pool;

pub use parts::map_items;
pub(crate) use parts::{
    Output, Part, Parts, computed_in_parts, computed_together, for_each_item, for_each_part,
};
pub(crate) use pool::{for_each_index, with_job_size};
pub use pool::{region_count, set_thread_count, thread_count};
