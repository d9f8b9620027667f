#![doc = include_str!("../README.md")]

mod page;
mod parts;

pub use page::{PageFile, files, script};
pub use parts::{
    FEATURE_CSS, FEATURE_HTML, GRAPH_CSS, GRAPH_HTML, HEAD_HTML, LEARNED_CSS, LEARNED_HTML, PARTS_CSS,
    REPORT_HTML, REPORT_PAGE_CSS, REPORT_PAGE_HTML, WRITING_CSS,
};
