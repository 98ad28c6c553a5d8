pub(crate) fn run() -> crate::shown::Outcome { Ok(()) }
