//! The device that tests are run on.

use anymesh::Device;

/// `ANYMESH_TEST_DEVICE` names it; without that the software adapter is taken where there is one.
pub(crate) fn under_test() -> Option<Device> {
    let name = std::env::var("ANYMESH_TEST_DEVICE");
    match anymesh::device(name.as_deref().unwrap_or("wgpu:software")) {
        Ok(device) => Some(device),
        Err(error) if name.is_ok() => panic!("{error}"),
        Err(error) => {
            eprintln!("skipped: {error}");
            None
        }
    }
}
