//! Objectives against recorded facts and formulas in plain loops, with their gradients, on one
//! device and on meshes.

mod bad_input;
mod contrastive;
mod grad_cache;
mod language;
mod preference;
mod support;
