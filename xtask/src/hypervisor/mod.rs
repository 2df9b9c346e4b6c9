//! The hypervisor's guests.

mod image;

pub use image::image_to;
