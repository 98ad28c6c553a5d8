//! The names of the files of a split folder, and of what their headers say.

/// The name of a file: `part` counts the files of a rank.
pub fn file_name(rank: usize, part: usize) -> String {
    format!("model-rank-{rank}-part-{part}.safetensors")
}

/// The key of a header whose value is the mesh, such as `tp=4`.
pub(super) const MESH: &str = "anymesh.mesh";
/// The key of a header whose value is a JSON object of names and types, such as `f32[8@tp, 4]`.
pub(super) const TYPES: &str = "anymesh.types";
