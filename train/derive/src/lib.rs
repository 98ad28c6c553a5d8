//! `#[derive(Module)]`: a struct of modules is a module.

use proc_macro::TokenStream;
use quote::quote;
use syn::{Data, DeriveInput, Fields, LitStr, spanned::Spanned};

/// Makes a struct whose fields are modules a module: parameters are found by the path of field
/// names that leads to them.
///
/// `#[name = "model.layers"]` gives a field another name (one with dots is a path, the empty one
/// adds nothing), `#[skip]` leaves a field out, for everything that holds no parameters.
#[proc_macro_derive(Module, attributes(name, skip))]
pub fn module(input: TokenStream) -> TokenStream {
    let input = syn::parse_macro_input!(input as DeriveInput);
    expand(&input)
        .unwrap_or_else(|error| error.to_compile_error())
        .into()
}

fn expand(input: &DeriveInput) -> syn::Result<proc_macro2::TokenStream> {
    let Data::Struct(data) = &input.data else {
        return Err(syn::Error::new(
            input.span(),
            "a module is a struct: an enum or union has no fixed parameters",
        ));
    };
    let Fields::Named(fields) = &data.fields else {
        return Err(syn::Error::new(
            data.fields.span(),
            "the fields of a module need names: they are the names of its parameters",
        ));
    };
    let (mut reads, mut writes) = (vec![], vec![]);
    for field in &fields.named {
        if field.attrs.iter().any(|a| a.path().is_ident("skip")) {
            continue;
        }
        let Some(ident) = &field.ident else { continue };
        let mut name = ident.to_string();
        if let Some(attribute) = field.attrs.iter().find(|a| a.path().is_ident("name")) {
            let value = &attribute.meta.require_name_value()?.value;
            name = syn::parse2::<LitStr>(quote!(#value))?.value();
        }
        reads.push(quote! {
            ::anymesh_train::Module::visit(&self.#ident, &::anymesh_train::join(path, #name), f);
        });
        writes.push(quote! {
            ::anymesh_train::Module::visit_mut(&mut self.#ident, &::anymesh_train::join(path, #name), f);
        });
    }
    let ident = &input.ident;
    let (generics, types, clause) = input.generics.split_for_impl();
    Ok(quote! {
        impl #generics ::anymesh_train::Module for #ident #types #clause {
            fn visit(&self, path: &str, f: &mut dyn FnMut(&str, &::anymesh_train::Param)) {
                #(#reads)*
            }
            fn visit_mut(&mut self, path: &str, f: &mut dyn FnMut(&str, &mut ::anymesh_train::Param)) {
                #(#writes)*
            }
        }
    })
}
