//! The command as users call it.

use std::process::Command;

/// A command of `anymesh`.
pub(crate) struct Called(pub(crate) &'static str);

impl Called {
    /// Whether it went well, and what it said.
    pub(crate) fn run(&self, args: &[&str]) -> (bool, String) {
        let out = Command::new(env!("CARGO_BIN_EXE_anymesh"))
            .arg(self.0)
            .args(args)
            .output()
            .unwrap();
        let text = match out.status.success() {
            true => out.stdout,
            false => out.stderr,
        };
        (out.status.success(), String::from_utf8(text).unwrap())
    }

    /// What it said, and it went well.
    pub(crate) fn text(&self, args: &[&str]) -> String {
        let (good, text) = self.run(args);
        assert!(good, "{text}");
        text
    }

    /// It did not go well, and said why.
    pub(crate) fn refused(&self, args: &[&str], why: &str) {
        let (good, text) = self.run(args);
        assert!(!good && text.contains(why), "{args:?}: {text}");
    }
}
