//! Variables of a thread that hold for the length of a scope.

use std::{cell::RefCell, thread::LocalKey};

/// Until it is dropped, also by a panic, a variable of this thread has another value.
pub(crate) struct Scoped<T: 'static> {
    variable: &'static LocalKey<RefCell<T>>,
    before: Option<T>,
}

impl<T: 'static> Scoped<T> {
    pub(crate) fn set(variable: &'static LocalKey<RefCell<T>>, value: T) -> Self {
        Self {
            variable,
            before: Some(variable.replace(value)),
        }
    }
}

impl<T: 'static> Drop for Scoped<T> {
    fn drop(&mut self) {
        if let Some(before) = self.before.take() {
            // A thread that is ending has no variables to restore.
            let _ = self.variable.try_with(|variable| variable.replace(before));
        }
    }
}
