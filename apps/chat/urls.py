from django.urls import path

from apps.chat import views

urlpatterns = [
    path("", views.page, name="chat"),
    path("c/<uuid:conversation_id>/", views.page, name="chat_conversation"),
    path("chat/conversations", views.conversations, name="chat_conversations"),
    path("chat/conversations/<uuid:conversation_id>", views.conversation, name="chat_detail"),
    path("chat/conversations/<uuid:conversation_id>/export.<str:kind>", views.export, name="chat_export"),
    path("chat/presets", views.presets, name="chat_presets"),
    path("chat/presets/<int:preset_id>", views.preset, name="chat_preset"),
]
